//! Communicators without some of their ranks, and with more: by NCCL's own functions, and otherwise by another way.

mod grow;
mod shrink;
// Each test file uses a part of these modules.
#[path = "../support/mod.rs"]
mod support;
