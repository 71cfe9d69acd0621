//! Finds what is wrong among the ranks, from the facts of each.
//!
//! - `view`: ranks, hosts and addresses; `causes`: the first failure, and ranks that wait; `transports`: the transports of
//!   data; `agreement`: what has to be the same on all ranks.

mod agreement;
mod causes;
mod transports;
mod view;

use super::collect::DebugLog;
use nccl_base::report::{Finding, Report};
use view::LogView;

impl DebugLog {
    /// Compares the facts of the processes.
    ///
    /// The names of the findings begin with `log-`. Fewer lines, for instance of `NCCL_DEBUG=WARN`, give fewer
    /// findings, and one finding says so.
    ///
    /// ```
    /// use nccl::debug_log::DebugLog;
    /// use nccl::preflight::Severity;
    ///
    /// let mut log = DebugLog::new();
    /// log.read("job.log", &b"a:7:8 [0] NCCL INFO NCCL version 2.27.7+cuda12.9\n"[..])?;
    /// log.read("job.log", &b"b:7:8 [0] NCCL INFO NCCL version 2.21.5+cuda12.4\n"[..])?;
    /// let report = log.report();
    /// assert_eq!(report.worst(), Severity::Error);
    /// assert_eq!(report.findings[0].check, "log-version");
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn report(&self) -> Report {
        let mut findings = level(self);
        if self.counts().nccl > 0 {
            let view = LogView::new(self);
            causes::warnings(&view, &mut findings);
            causes::retries(&view, &mut findings);
            agreement::versions(&view, &mut findings);
            agreement::variables(&view, &mut findings);
            transports::interfaces(&view, &mut findings);
            transports::networks(&view, &mut findings);
            transports::plugins(&view, &mut findings);
            transports::inside_hosts(&view, &mut findings);
            transports::direct_rdma(&view, &mut findings);
            causes::ends(&view, &mut findings);
            // Last, because the findings above may explain these.
            causes::starts(&view, &mut findings);
        }
        Report::in_order(findings)
    }
}

/// Whether the logs hold enough to judge by.
fn level(log: &DebugLog) -> Vec<Finding> {
    let counts = log.counts();
    if counts.nccl == 0 {
        let what = format!("in {} lines there is none of NCCL's", counts.lines);
        let fix =
            "run all ranks with NCCL_DEBUG=INFO; a file for each: NCCL_DEBUG_FILE=/tmp/nccl.%h.%p";
        return vec![Finding::warning("log-level", what).fix(fix)];
    }
    if counts.info == 0 {
        let what = "the logs hold warnings only: neither ranks nor networks are in them";
        return vec![Finding::warning("log-level", what).fix("run all ranks with NCCL_DEBUG=INFO")];
    }
    Vec::new()
}
