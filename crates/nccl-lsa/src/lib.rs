//! An all-to-all of small messages by a kernel of this crate, which stores into the memory of the other ranks.
#![cfg(not(loom))]
#![allow(
    rustdoc::private_intra_doc_links,
    reason = "an internal crate: who reads its pages reads its sources"
)]

mod all_to_all;
mod kernel;
mod request;

pub use all_to_all::LoadStoreAllToAll;
pub use request::LoadStoreRequest;

use nccl_base::error;
use nccl_core::{buffer, communicator, cuda_driver, drop_queue, issuing};
