//! The process of a rank: its host, its process, and where it listens.

use std::net::{IpAddr, SocketAddr};

use crate::process;
use crate::process_state::ProcessState;
use crate::slot::Slot;

/// The process of a rank.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct RankProcess {
    pub host: String,
    pub pid: u32,
    pub slot: Option<Slot>,
    /// Its launcher rank, if it is known and no other rank claims it.
    pub launcher_rank: Option<usize>,
    /// The address at which it listens, unless it is a thread of this process.
    pub at: Option<String>,
    /// A checksum of the kernel and the namespace that are the scope of `pid`; 0 if not known.
    pub kernel: u64,
}

/// Returns the launcher ranks of `processes`; `None` where a launcher rank is not known.
pub fn launcher_ranks(processes: Option<&Vec<RankProcess>>) -> Vec<Option<usize>> {
    let processes = processes.into_iter().flatten();
    processes.map(|member| member.launcher_rank).collect()
}

impl RankProcess {
    /// Returns the IP address over which the rank is reached, if it is reached over TCP.
    fn address(&self) -> Option<IpAddr> {
        let at = self.at.as_deref()?.strip_prefix("tcp:")?;
        Some(at.parse::<SocketAddr>().ok()?.ip())
    }

    /// Whether a network failure that cuts off one of the two also cuts off the other, because they are reached at one
    /// address. A host name is no evidence, as many hosts are called `localhost` or `ubuntu`.
    pub fn is_on_same_host(&self, other: &Self) -> bool {
        let own = self.address();
        own.is_some() && own == other.address()
    }

    /// Describes a rank that is a thread of this process.
    pub(crate) fn here(slot: Option<Slot>) -> Self {
        Self {
            host: crate::host::name().to_string(),
            pid: std::process::id(),
            slot,
            launcher_rank: None,
            at: None,
            kernel: process::kernel_sum(),
        }
    }

    /// Whether the process id is valid in this process.
    pub fn is_here(&self) -> bool {
        self.kernel != 0 && self.kernel == process::kernel_sum()
    }

    /// Returns the state of the process, if it runs under this kernel and cannot run now.
    pub fn suspended_state(&self) -> Option<ProcessState> {
        let state = self
            .is_here()
            .then(|| process::state_of(self.pid.into()))
            .flatten();
        state.filter(ProcessState::cannot_run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_beside_each_other_by_their_address_and_not_by_the_name_of_their_host() {
        let member = |at: Option<&str>| RankProcess {
            host: String::from("ubuntu"),
            pid: 7,
            slot: None,
            launcher_rank: None,
            at: at.map(str::to_owned),
            kernel: 0,
        };
        let one = member(Some("tcp:10.0.0.1:4000"));
        assert!(one.is_on_same_host(&member(Some("tcp:10.0.0.1:4001"))));
        assert!(!one.is_on_same_host(&member(Some("tcp:10.0.0.2:4000"))));
        let six = member(Some("tcp:[fe80::1]:4000"));
        assert!(six.is_on_same_host(&member(Some("tcp:[fe80::1]:9"))));
        // Nothing is known of ranks without an address.
        assert!(!member(None).is_on_same_host(&member(None)));
        let local = member(Some("unix:/tmp/x"));
        assert!(!local.is_on_same_host(&local.clone()));
    }
}
