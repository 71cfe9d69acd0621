//! The connections of a driver of machines: made, read, written and closed. This module knows frames of machines, and no machine.
//!
//! - `driver`: the interface to the driver; `dialer`: connecting; `port`: a connection; `ports`: all connections of a driver.

mod dialer;
mod driver;
mod port;
mod ports;

pub(crate) use dialer::Dialer;
pub(crate) use driver::Driver;
pub(crate) use port::Port;
pub(crate) use ports::Ports;
