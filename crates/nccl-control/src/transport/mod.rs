//! The connections of a driver of machines: made, read, written and closed. It knows frames of machines, and no machine.
//!
//! - `driver`: what a driver is told; `dialer`: connecting; `port`: a connection; `ports`: all of a driver.

mod dialer;
mod driver;
mod port;
mod ports;

pub(crate) use dialer::Dialer;
pub(crate) use driver::Driver;
pub(crate) use port::Port;
pub(crate) use ports::Ports;
