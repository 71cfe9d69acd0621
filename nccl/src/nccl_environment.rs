//! The environment that NCCL reads in this process: values that follow from the program's own settings.

use std::net::IpAddr;
use std::sync::{Once, OnceLock};

use crate::nccl_profiler;
use nccl_base::error::{Error, Result};
use nccl_control::Rendezvous;
use nccl_core::recorder;
use nccl_diagnose::ras::{AddressReservation, reserve_address};
use nccl_launch::nccl_variables_for;
use nccl_plugin::Offer;
use nccl_plugin::environment::{self, Refusal, Variable};
use nccl_sys::Version;

/// Offers NCCL the environment of this process, and a RAS address of its own. To be called before the first
/// communicator; an observer does not use NCCL, and needs no call.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(offer);
}

fn offer() {
    nccl_profiler::install();
    recorder::set_ras_address(ras_address);
    match environment::install() {
        Offer::Made => choose_ras_address(),
        Offer::UserHasOne(other) => {
            tracing::info!(name: "nccl.environment.other", target: "nccl", %other, "NCCL reads its environment through a plugin of the user's");
        }
        Offer::Failed(why) => {
            tracing::info!(name: "nccl.environment.unavailable", target: "nccl", why, "NCCL reads its environment from the process alone");
        }
    }
}

/// Gives this process a RAS address of its own: processes of one user on one host share the default port, and any of
/// them may answer a client.
fn choose_ras_address() {
    static RESERVED: OnceLock<AddressReservation> = OnceLock::new();
    // Without a reserved address, NCCL takes its default.
    let Ok(reservation) = reserve_address() else {
        return;
    };
    let address = reservation.address().to_string();
    if environment::set(Variable::RasAddress, &address).is_ok() {
        let _ = RESERVED.set(reservation);
    }
}

/// Returns where NCCL's RAS service of this process listens: the exported address, or the one that was set here and
/// that NCCL has read.
fn ras_address() -> Option<String> {
    let exported = std::env::var("NCCL_RAS_ADDR").ok();
    exported.or_else(|| {
        let is_read = environment::is_in_effect(Variable::RasAddress);
        is_read
            .then(|| environment::get(Variable::RasAddress))
            .flatten()
    })
}

/// Makes NCCL use the interface that the program named for the ranks' own connections: a name, the beginning of a name,
/// or a subnet. An exported variable with another value takes precedence, with a warning. An address is ignored: it
/// belongs to rank 0's host alone, and selects nothing on other hosts.
///
/// # Errors
/// [`ErrorKind::Rendezvous`](nccl_base::error::ErrorKind::Rendezvous) when NCCL in this process already uses another
/// interface, because of an earlier world.
pub(crate) fn use_interface_of(rendezvous: &Rendezvous) -> Result<()> {
    install();
    let interface = rendezvous.interface_text();
    let Some(interface) = interface.filter(|text| text.parse::<IpAddr>().is_err()) else {
        return Ok(());
    };
    // The setting is needed on rank 0 alone. Another host may have no such interface: the preflight compares them.
    let variables = nccl_variables_for(&interface).unwrap_or_default();
    for (name, value) in variables {
        let Some(variable) = Variable::named(&name) else {
            continue;
        };
        match environment::set(variable, &value) {
            Ok(()) => {}
            Err(Refusal::SetBefore(before)) => {
                return Err(Error::rendezvous(format!(
                    "NCCL of this process uses {name}={before}, from an earlier world, and the interface {interface:?} of this one is \
                     {name}={value}: NCCL reads it once per process, so use one interface, or another process"
                )));
            }
            Err(Refusal::Exported(exported)) => {
                tracing::warn!(
                    name: "nccl.environment.contradicted",
                    target: "nccl",
                    variable = name,
                    exported,
                    value,
                    "NCCL uses the exported value, and not the interface {interface:?} of the rendezvous: unset the variable, or export the \
                     same"
                );
            }
            Err(Refusal::ReadBefore | Refusal::ZeroByte) => {
                tracing::warn!(
                    name: "nccl.environment.late",
                    target: "nccl",
                    variable = name,
                    value,
                    "NCCL was used before the world was joined, and has chosen its interface without the rendezvous's"
                );
            }
        }
    }
    Ok(())
}

/// Checks that NCCL reads the environment that this process offers; the error is the reason why it does not.
pub(crate) fn is_read() -> std::result::Result<(), &'static str> {
    match environment::install() {
        Offer::Made => Ok(()),
        Offer::UserHasOne(_) => Err(
            "NCCL reads its environment through a plugin of the user's: export the variables (docs/nccl-environment.md)",
        ),
        Offer::Failed(_) => Err(
            "NCCL reads its environment from the process alone here: export the variables (docs/nccl-environment.md)",
        ),
    }
}

/// The first release that reads its environment through a plugin.
pub(crate) const SINCE: Version = Version::new(2, 28, 7);

/// Returns the variables by which a library of this release gets the interface of the rendezvous.
pub(crate) fn interface_variables(version: Version) -> Vec<(String, String)> {
    if version < SINCE || *environment::install() != Offer::Made {
        return Vec::new();
    }
    [Variable::SocketInterface, Variable::SocketFamily]
        .into_iter()
        .filter_map(|variable| Some((variable.to_string(), environment::get(variable)?)))
        .collect()
}
