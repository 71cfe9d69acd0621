//! Listening in rank 0's place, for those who would otherwise look for it in vain.

use std::sync::Arc;

use super::environment::Rendezvous;
use super::explain::ranges;
use super::hub::Hub;
use super::server::Server;
use crate::departure::Departure;
use crate::error::{Error, Result};

/// Tells every rank that comes why rank 0 will not. Ends when all have been told, or when `enough` says so,
/// which is asked all the time, and waits in between.
///
/// # Errors
/// The address cannot be had, or not all came.
pub(super) fn stand_in(
    rendezvous: &Rendezvous,
    departure: Departure,
    mut enough: impl FnMut(&Hub) -> bool,
) -> Result<()> {
    let hub = Arc::new(Hub::new(rendezvous.world_size));
    hub.leave(0, departure);
    let job = rendezvous.job.clone();
    let server = Server::start(&rendezvous.address, Arc::clone(&hub), job)?;
    while !hub.is_over() {
        if enough(&hub) {
            let unheard = ranges(&hub.present());
            drop(server);
            return Err(Error::rendezvous(format!(
                "ranks {unheard} have not come to hear of it"
            )));
        }
    }
    Ok(())
}
