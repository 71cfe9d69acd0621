//! The log lines that describe a communicator, in the words of the emulated release.

use std::time::Instant;

use super::identity;
use super::state::Communicator;
use crate::nccl::debug::{info, subsystem};
use crate::version;
use cuda_emulator::driver::visible;

/// The contents of a communicator's `Init START` and `Init COMPLETE` lines.
pub(super) struct Birth<'c> {
    communicator: &'c Communicator,
    function: &'static str,
    /// For a split or a shrink: the parent, and the number, color and key of the child.
    parent: Option<(&'c Communicator, u64, i32, i32)>,
    began: Instant,
}

impl<'c> Birth<'c> {
    /// For a communicator without a parent.
    pub(super) fn new(communicator: &'c Communicator, function: &'static str) -> Self {
        Self {
            communicator,
            function,
            parent: None,
            began: Instant::now(),
        }
    }

    /// For a child.
    pub(super) fn of_child(
        communicator: &'c Communicator,
        function: &'static str,
        parent: (&'c Communicator, u64, i32, i32),
    ) -> Self {
        let parent = Some(parent);
        Self {
            parent,
            ..Self::new(communicator, function)
        }
    }

    pub(super) fn start(&self) {
        // NCCL chooses its network before the start.
        info!(subsystem::INIT | subsystem::NET, "Using network Emulator");
        let rank = match self.parent {
            None if version::is_at_least(2, 29, 2) => format!("[Rank {}] ", self.communicator.rank),
            _ => String::new(),
        };
        // 2.32 added the missing blank before the rank.
        let blank = match self.parent {
            Some(_) if version::is_at_least(2, 23, 0) && !version::is_at_least(2, 32, 0) => "",
            _ => " ",
        };
        info!(
            subsystem::INIT,
            "{rank}{}{blank}- Init START",
            self.description()
        );
    }

    /// Logs the end of the init; `bootstrap` is the time to meet the other ranks, in seconds.
    pub(super) fn complete(&self, bootstrap: f64) {
        info!(subsystem::INIT, "{} - Init COMPLETE", self.description());
        if !version::is_at_least(2, 22, 0) {
            return;
        }
        let (function, alloc) = match version::is_at_least(2, 23, 0) {
            true => (format!(" - {}", self.function), " alloc 0.00,"),
            false => (String::new(), ""),
        };
        let total = self.began.elapsed().as_secs_f64();
        // The emulator has neither kernels nor a topology to detect.
        info!(
            subsystem::INIT,
            "Init timings{function}: rank {} nranks {} total {total:.2} (kernels 0.00,{alloc} bootstrap {bootstrap:.2}, \
             allgathers 0.00, topo 0.00, graphs 0.00, connections 0.00, rest {:.2})",
            self.communicator.rank,
            self.communicator.ranks,
            (total - bootstrap).max(0.0)
        );
    }

    fn description(&self) -> String {
        let communicator = self.communicator;
        let device = communicator.device;
        let function = match version::is_at_least(2, 21, 0) {
            true => format!("{} ", self.function),
            false => String::new(),
        };
        let id = format!(" commId {:#x}", communicator.hash);
        let (before, parent, after) = match self.parent {
            None => (id, String::new(), String::new()),
            // Before 2.21 the line of a child is like any other. Until 2.22 the id comes last, later
            // there is none.
            Some(_) if !version::is_at_least(2, 21, 0) => (id, String::new(), String::new()),
            Some((parent, number, color, key)) => {
                let number = match () {
                    () if version::is_at_least(2, 29, 0) => format!(" childCount {number}"),
                    () if version::is_at_least(2, 24, 0) => format!(" splitCount {number}"),
                    () => String::new(),
                };
                let parent = format!(
                    " parent {:#x}{number} color {color} key {key}",
                    parent.handle()
                );
                match () {
                    () if version::is_at_least(2, 32, 0) => (id, parent, String::new()),
                    () if version::is_at_least(2, 23, 0) => (String::new(), parent, String::new()),
                    () => (String::new(), parent, id),
                }
            }
        };
        format!(
            "{function}comm {:#x} rank {} nranks {} cudaDev {device} nvmlDev {} busId {:x}{before}{parent}{after}",
            communicator.handle(),
            communicator.rank,
            communicator.ranks,
            visible::physical(device.unsigned_abs()),
            identity::bus_id(device)
        )
    }
}

/// Returns the description of a communicator in lines about its end. Some lines use `nranks`, some
/// `nRanks`.
pub(crate) fn ending(communicator: &Communicator, ranks: &str) -> String {
    let id = match version::is_at_least(2, 32, 0) {
        true => format!(" commId {:#x}", communicator.hash),
        false => String::new(),
    };
    format!(
        "comm {:#x} rank {} {ranks} {} cudaDev {} busId {:x}{id}",
        communicator.handle(),
        communicator.rank,
        communicator.ranks,
        communicator.device,
        identity::bus_id(communicator.device)
    )
}
