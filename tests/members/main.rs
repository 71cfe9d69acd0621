//! Communicators without some of their ranks, and with more: by NCCL's own way, and where that is not possible by
//! another.

mod grow;
mod shrink;
// Of the rooms of these tests, each uses a part.
#[path = "../support/mod.rs"]
mod support;
