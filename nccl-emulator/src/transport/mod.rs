//! What the ranks of one communicator share: a segment of slots and bells.
