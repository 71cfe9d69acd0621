//! Communicators without some of their ranks, and with more: by NCCL's own functions, and otherwise by another way.

mod grow;
mod shrink;
