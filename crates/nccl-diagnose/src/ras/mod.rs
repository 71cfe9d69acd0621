//! NCCL's RAS service: [`client`] speaks its protocol, [`report`] reads its answers.

mod client;
mod report;
mod reserve;

pub use client::{RasAnswer, RasClient, RasEvents};
pub use report::{
    LaggingRank, MissingRasRank, MissingStatus, RasCommunicator, RasRank, RasReport, RasStatus,
};
#[doc(hidden)]
pub use reserve::{AddressReservation, reserve_address};
