//! Faults on purpose: delay, hang or fail a chosen call on a chosen rank.
