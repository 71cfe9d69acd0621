//! The connections of a driver of machines: opening, reading, writing and closing them. This module knows the frames of
//! machines, but no machine.
//!
//! - `driver`: the interface to the driver; `dialer`: connecting; `peer_connection`: a connection; `peer_connections`: all connections of a driver.

mod dialer;
mod driver;
mod peer_connection;
mod peer_connections;

pub(crate) use dialer::Dialer;
pub(crate) use driver::MachineDriver;
pub(crate) use peer_connection::PeerConnection;
pub(crate) use peer_connections::PeerConnections;
