//! One interface for NCCL and for this crate's own connections.

use std::net::IpAddr;

use nccl_control::{Interface, Own, own_addresses};

#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
#[cfg(doc)]
use nccl_control::Rendezvous;

/// The variables that make NCCL use the same interface of this host as [`Rendezvous::interface`] does for
/// this text: a name, the beginning of one, a subnet or an address; none for `*`.
///
/// They have to be in the environment before the process starts: safe code never changes it.
///
/// # Errors
/// [`ErrorKind::Rendezvous`] when no interface that is up matches; [`ErrorKind::Io`] when the system does not list its
/// interfaces.
///
/// ```
/// use nccl::preflight::nccl_variables_for;
///
/// let variables = nccl_variables_for("127.0.0.0/8")?;
/// assert!(variables.contains(&("NCCL_SOCKET_IFNAME".into(), "=lo".into())));
/// # Ok::<(), nccl::Error>(())
/// ```
pub fn nccl_variables_for(interface: &str) -> Result<Vec<(String, String)>> {
    let interface = Interface::parse(interface)?;
    let own = own_addresses().map_err(Error::io("looking at this host's interfaces"))?;
    variables_among(&interface, &own)
}

fn variables_among(interface: &Interface, own: &[Own]) -> Result<Vec<(String, String)>> {
    if *interface == Interface::Any {
        return Ok(Vec::new());
    }
    let chosen = interface.choose(own)?;
    let family = match chosen.address {
        IpAddr::V4(_) => "AF_INET",
        IpAddr::V6(_) => "AF_INET6",
    };
    Ok(vec![
        (
            String::from("NCCL_SOCKET_IFNAME"),
            format!("={}", chosen.name),
        ),
        (String::from("NCCL_SOCKET_FAMILY"), family.to_owned()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_is_told_the_whole_name_and_the_family() {
        let own = [
            ("eth1", "10.1.0.7"),
            ("eth1", "fd00::7"),
            ("eth10", "10.2.0.7"),
        ]
        .map(|(name, address)| Own {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            prefix: 24,
            scope: 0,
            up: true,
        });
        for (text, name, family) in [
            ("eth", "=eth1", "AF_INET"),
            ("fd00::/8", "=eth1", "AF_INET6"),
            ("10.2.0.0/16", "=eth10", "AF_INET"),
        ] {
            let variables = variables_among(&Interface::parse(text).unwrap(), &own).unwrap();
            let values: Vec<_> = variables.iter().map(|(_, value)| &value[..]).collect();
            assert_eq!(values, [name, family], "{text}");
        }
        assert_eq!(variables_among(&Interface::Any, &own).unwrap(), []);
        let nowhere = Interface::parse("ib0").unwrap();
        assert!(
            variables_among(&nowhere, &own)
                .unwrap_err()
                .to_string()
                .contains("eth1 10.1.0.7")
        );
    }
}
