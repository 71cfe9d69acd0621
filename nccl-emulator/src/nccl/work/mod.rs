//! The execution of a launch when its stream reaches it.
//!
//! A [`Launch`] runs the operations of one group on one communicator: first the one-sided operations,
//! in the order of their calls; then the collectives, one after the other, largest first; then all
//! messages at once. That is NCCL's order, and no operation of a group may depend on another one in it.
//! Addresses are looked up now, not when the call was made.
//!
//! An abort ends a launch at its next step, and the stream continues as after a success: the data is
//! garbage, as on a GPU. An operation that can never complete (sizes that differ, a peer's bad memory)
//! leaves the launch waiting for an abort.

mod collective;
mod connection;
mod lane;
mod launch;
mod lists;
mod local;
mod observe;
mod one_sided;
mod point_to_point;
mod proxies;
mod replay;
mod ring;
mod scope;
mod trouble;

pub(crate) use launch::Launch;
pub(crate) use lists::Lists;
pub(crate) use local::LocalCopy;
pub(crate) use replay::CapturedLaunch;
