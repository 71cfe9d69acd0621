//! The ends of the processes of this kernel, each watched by a descriptor of its own.

use std::os::fd::OwnedFd;
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
    let watcher = Arc::new(Watcher {
        node: Weak::clone(node),
        member: peer.id,
        told: Mutex::new(false),
    });
    let token = Reactor::get()
        .and_then(|reactor| reactor.add(&*descriptor, EventFlags::IN, watcher as Arc<dyn Source>));
    match token {
        Ok(token) => Kept::Watched(Arc::new(Vigil {
            descriptor,
            token: Some(token),
        })),
        Err(_) => Kept::Elsewhere,
    }
}

impl Drop for Vigil {
    fn drop(&mut self) {
        if let (Some(token), Ok(reactor)) = (self.token.take(), Reactor::get()) {
            reactor.remove(&*self.descriptor, token);
        }
    }
}

struct Watcher {
    node: Weak<Node>,
    member: MemberId,
    told: Mutex<bool>,
}

impl Source for Watcher {
    fn ready(self: Arc<Self>, _: EventFlags) {
        if std::mem::replace(&mut *self.told.lock(), true) {
            return;
        }
        if let Some(node) = self.node.upgrade() {
            node.process_ended(self.member);
        }
    }
}
