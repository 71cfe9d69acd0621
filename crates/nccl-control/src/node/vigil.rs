//! The ends of the processes of this kernel, each watched by a descriptor of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use super::Node;
use crate::process::{self, Found};
use crate::proto::{MemberId, Peer};
use crate::reactor::{EventFlags, Reactor, Source};
use crate::sync::Mutex;

/// Watches one process, until it is dropped.
pub(super) struct Vigil {
    descriptor: Arc<OwnedFd>,
    token: Option<u64>,
}

/// What was found of a process.
pub(super) enum Kept {
    Watched(Arc<Vigil>),
    /// It has ended already.
    Ended,
    /// It has no number here.
    Elsewhere,
}

pub(super) fn keep(node: &Weak<Node>, peer: &Peer) -> Kept {
    let is_here = peer.kernel != 0 && peer.kernel == process::kernel_sum();
    if !is_here || peer.pid == std::process::id() {
        return Kept::Elsewhere;
    }
    let descriptor = match process::find(peer.pid, peer.started) {
        Found::Process(descriptor) => Arc::new(descriptor),
        Found::Ended => return Kept::Ended,
        Found::Unknown => return Kept::Elsewhere,
    };
    match watch(node, descriptor, Of::Member(peer.id)) {
        Some(vigil) => Kept::Watched(vigil),
        None => Kept::Elsewhere,
    }
}

/// Watches the process that forms the first generation, at the other end of a Unix socket: who it is, it has not said yet.
pub(super) fn keep_former(node: &Weak<Node>, socket: impl AsFd) -> Option<Arc<Vigil>> {
    let (descriptor, pid) = process::at_the_other_end(socket)?;
    watch(node, Arc::new(descriptor), Of::Former(pid))
}

fn watch(node: &Weak<Node>, descriptor: Arc<OwnedFd>, of: Of) -> Option<Arc<Vigil>> {
    let watcher = Arc::new(Watcher {
        node: Weak::clone(node),
        of,
        told: Mutex::new(false),
    });
    let reactor = Reactor::get().ok()?;
    let token = reactor.add(&*descriptor, EventFlags::IN, watcher as Arc<dyn Source>);
    let token = Some(token.ok()?);
    Some(Arc::new(Vigil { descriptor, token }))
}

impl Drop for Vigil {
    fn drop(&mut self) {
        if let (Some(token), Ok(reactor)) = (self.token.take(), Reactor::get()) {
            reactor.remove(&*self.descriptor, token);
        }
    }
}

/// Whose end it is.
enum Of {
    Member(MemberId),
    /// Of the process that forms the first generation, with its number.
    Former(u64),
}

struct Watcher {
    node: Weak<Node>,
    of: Of,
    told: Mutex<bool>,
}

impl Source for Watcher {
    fn ready(self: Arc<Self>, _: EventFlags) {
        if std::mem::replace(&mut *self.told.lock(), true) {
            return;
        }
        if let Some(node) = self.node.upgrade() {
            match self.of {
                Of::Member(member) => node.process_ended(member),
                Of::Former(pid) => node.former_ended(pid),
            }
        }
    }
}
