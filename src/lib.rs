//! What the benchmark programs share.
