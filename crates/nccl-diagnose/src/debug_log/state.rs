//! The communicator of a line that does not name it.
//!
//! One init runs on one thread, so a thread's lines before `Init START` belong to the communicator that it then names.
//! Later lines of other threads are matched by rank and device.

use std::collections::HashMap;

use super::facts::{InitState, Link, Membership, Process, Transport, cut};
use super::message::{Channel, Init, Stage, Via};

/// The setting in which NCCL writes a communicator's name.
pub(super) const COMM_NAME: &str = "Comm name";

const MOST_COMMUNICATORS: usize = 256;
/// Maximum number of links of one communicator on one rank, inside its host and to other hosts; and of all links. A
/// thousand ranks that all exchange messages have millions.
const MOST_LINKS: usize = 4096;
const MOST_NET_LINKS: usize = 128;
const MOST_LINKS_IN_ALL: usize = 1 << 18;
const MOST_THREADS: usize = 1024;

/// The state of reading.
#[derive(Debug, Default)]
pub(super) struct State {
    threads: HashMap<u32, Thread>,
}

/// The communicator that a thread's lines are about.
#[derive(Clone, Debug, Default)]
struct Thread {
    /// Its latest communicator.
    membership: Option<usize>,
    /// The network, from a line before the communicator was named.
    network: Option<String>,
}

impl State {
    fn thread(&mut self, tid: u32) -> &mut Thread {
        // Threads come and go; lines of forgotten threads are matched by rank.
        if self.threads.len() == MOST_THREADS && !self.threads.contains_key(&tid) {
            self.threads.clear();
        }
        self.threads.entry(tid).or_default()
    }

    /// The communicator of a thread.
    pub(super) fn current<'p>(
        &mut self,
        process: &'p mut Process,
        tid: u32,
    ) -> Option<&'p mut Membership> {
        let of_thread = self.threads.get(&tid).and_then(|thread| thread.membership);
        let only = (process.communicators.len() == 1).then_some(0);
        process.communicators.get_mut(of_thread.or(only)?)
    }

    /// The rank of a thread in its process's largest communicator.
    pub(super) fn rank(&self, process: &Process, tid: u32) -> Option<usize> {
        let ranks = process.ranks();
        if let [rank] = ranks[..] {
            return Some(rank);
        }
        let of_thread = self.threads.get(&tid).and_then(|thread| thread.membership);
        let rank = of_thread.map(|index| process.communicators[index].rank);
        rank.filter(|rank| ranks.contains(rank)).or(process.tag)
    }

    pub(super) fn init(&mut self, process: &mut Process, tid: u32, stage: Stage, init: &Init<'_>) {
        let same = |one: &Membership| {
            one.comm == init.comm && one.rank == init.rank && one.ranks == init.ranks
        };
        let known = process.communicators.iter().rposition(|one| {
            same(one) && (stage == Stage::Completed || one.state == InitState::Started)
        });
        let index = match known {
            Some(index) => index,
            None if process.communicators.len() < MOST_COMMUNICATORS => {
                process.communicators.push(Membership {
                    comm: cut(init.comm),
                    rank: init.rank,
                    ranks: init.ranks,
                    device: init.device,
                    nvml_device: init.nvml_device.or(init.device),
                    id: init.id.map(cut),
                    parent: init.parent.map(cut),
                    ..Membership::default()
                });
                let index = process.communicators.len() - 1;
                idle(process, index);
                index
            }
            None => return,
        };
        let membership = &mut process.communicators[index];
        if stage == Stage::Completed {
            membership.state = InitState::Completed;
        }
        let thread = self.thread(tid);
        thread.membership = Some(index);
        if let Some(network) = thread.network.take() {
            membership.network.get_or_insert(network);
        }
    }

    pub(super) fn network(&mut self, process: &mut Process, tid: u32, name: &str) {
        // Releases so far write it before `Init START`; a later line is understood, too.
        let running = self.thread(tid).membership.filter(|&index| {
            let one = &process.communicators[index];
            one.state == InitState::Started && one.network.is_none()
        });
        match running {
            Some(index) => process.communicators[index].network = Some(cut(name)),
            None => self.thread(tid).network = Some(cut(name)),
        }
    }

    /// Adds a link. `kept` counts the links of all communicators.
    pub(super) fn channel(
        &mut self,
        process: &mut Process,
        tid: u32,
        channel: &Channel<'_>,
        kept: &mut usize,
    ) {
        let own = if channel.received {
            channel.to
        } else {
            channel.from
        };
        let fits = |one: &Membership| {
            one.rank == own
                && one.ranks > channel.from.max(channel.to)
                && (channel.device.is_none() || channel.device == one.nvml_device)
        };
        let of_thread = self.threads.get(&tid).and_then(|thread| thread.membership);
        let of_thread = of_thread.filter(|&index| fits(&process.communicators[index]));
        let Some(index) = of_thread.or_else(|| process.communicators.iter().rposition(fits)) else {
            return;
        };
        let via = match channel.via {
            Via::P2p(kind) => Transport::P2p(cut(kind)),
            Via::Shm => Transport::Shm,
            Via::Net { net, adapter, gdr } => Transport::Net {
                net: cut(net),
                adapter: cut(adapter),
                gdr,
            },
        };
        let is_named = process.has_idle_parents;
        let membership = &mut process.communicators[index];
        // A communicator with connections of its own is no idle parent, if only its child had suggested that.
        membership.is_idle &= is_named;
        let (from, to) = (channel.from, channel.to);
        let link = Link { from, to, via };
        if let Some(channels) = membership.links.get_mut(&link) {
            *channels += 1;
            return;
        }
        let over_network = matches!(link.via, Transport::Net { .. });
        let room = if over_network {
            membership.net_links < MOST_NET_LINKS
        } else {
            membership.links.len() < MOST_LINKS
        };
        if room && *kept < MOST_LINKS_IN_ALL {
            membership.links.insert(link, 1);
            membership.net_links += usize::from(over_network);
            *kept += 1;
        } else {
            membership.more_links += 1;
        }
    }
}

/// Sets whether the new communicator at `index` is an idle parent, or marks its parent as one. The name of an idle
/// parent is logged before its thread is known. A child identifies its parent; where no names are logged at all, the
/// child alone identifies an idle parent.
fn idle(process: &mut Process, index: usize) {
    let (earlier, new) = process.communicators.split_at_mut(index);
    let child = &mut new[0];
    let parent = earlier.iter_mut().rev();
    let parent = parent.into_iter().find(|one| child.carries_data_of(one));
    let has_names = process.config.contains_key(COMM_NAME);
    match parent {
        Some(parent) if process.has_idle_parents => parent.is_idle = true,
        Some(parent) if !has_names && parent.links.is_empty() => parent.is_idle = true,
        None if process.idle_to_come > 0 => {
            process.idle_to_come -= 1;
            child.is_idle = true;
        }
        _ => {}
    }
}
