//! The text that nccl-tests prints, to the byte: header, device lines, rows, footer.
//!
//! Output beyond it goes into lines that begin with `# `, which readers of nccl-tests' output skip, and never between
//! rows.

use crate::options::{Blocking, Options};
use crate::printf::{cell, general};
use crate::sizes::Step;
use crate::statistics::Summary;

/// The release of nccl-tests whose text, options and JSON this is.
pub const NCCL_TESTS_VERSION: &str = "2.19.6";

/// How nccl-tests writes a time of day.
pub const TIMESTAMP_FORMAT: &str = "%Y-%m-%d %H:%M:%S";

/// The lines up to `# Using devices`. Versions are NCCL's numbers, 23203 for 2.32.3.
#[must_use]
pub fn preamble(program: &str, headers: u32, library: u32, options: &Options) -> String {
    let (step, kind) = match options.sweep.step {
        Step::Factor(factor) => (factor, "factor"),
        Step::Bytes(bytes) => (bytes, "bytes"),
    };
    let mut text = format!(
        "# nccl-tests version {NCCL_TESTS_VERSION} nccl-headers={headers} nccl-library={library}\n\
         # Collective test starting: {program}\n\
         # nThread {} nGpus {} minBytes {} maxBytes {} step: {step}({kind}) warmup iters: {} \
         iters: {} agg iters: {} validation: {} graph: {} unalign: {}\n",
        options.threads,
        options.gpus,
        options.sweep.min,
        options.sweep.max,
        options.warm_up,
        options.iterations,
        options.aggregate,
        options.checks,
        options.graph,
        options.unalign,
    );
    text.push_str(match options.blocking {
        Blocking::Never => "",
        Blocking::WaitAndBarrier => {
            "# Blocking Enabled: wait and barrier after each inner iteration (-m) \n"
        }
        Blocking::Wait => "# Blocking Enabled: wait after each inner iteration (-m), no barrier \n",
        Blocking::WaitAndUntimedBarrier => {
            "# Blocking Enabled: wait and barrier after each outer iteration (-n); \
             time excludes barrier \n"
        }
    });
    if options.per_iteration {
        text.push_str("# Per-Iteration Report: CUDA event timing; i_* uses max over process rows");
        if options.per_iteration_skip > 0 {
            let skip = options.per_iteration_skip;
            text.push_str(&format!("; summary skips first {skip} iterations"));
        }
        text.push_str(" \n");
    }
    if options.parallel_init {
        text.push_str("# Parallel Init Enabled: threads call into NcclInitRank concurrently \n");
    }
    text.push_str("#\n# Using devices\n");
    text
}

/// Process and device of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLine {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// Its host, up to the first dot.
    pub host: String,
    /// The ordinal of its device.
    pub device: usize,
    /// PCI domain, bus and device.
    pub pci: [u32; 3],
    /// The device's name.
    pub name: String,
}

impl DeviceLine {
    /// PCI domain, bus and device, as nccl-tests writes them.
    #[must_use]
    pub fn pci_text(&self) -> String {
        let [domain, bus, device] = self.pci;
        format!("{domain:04x}:{bus:02x}:{device:02x}")
    }

    /// The line below `# Using devices`.
    #[must_use]
    pub fn text(&self) -> String {
        let Self {
            rank,
            pid,
            host,
            device,
            name,
            ..
        } = self;
        let pci = self.pci_text();
        format!(
            "#  Rank {rank:>2} Group  0 Pid {pid:>6} on {host:>10} device {device:>2} [{pci}] {name}\n"
        )
    }
}

/// The optional columns of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// The times are the host's time to enqueue (`-C 1`).
    pub cpu_time: bool,
    /// Each row ends with the time of day (`-S 1`).
    pub timestamps: bool,
    /// Each placement has four more columns (`-I 1`).
    pub per_iteration: bool,
}

/// The cells of one placement of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Cells {
    /// Time of one operation in µs.
    pub time_us: f64,
    /// Algorithm bandwidth in GB/s.
    pub algorithm: f64,
    /// Bus bandwidth in GB/s.
    pub bus: f64,
    /// The number of wrong elements over all ranks; `None`: not verified.
    pub wrong: Option<u64>,
    /// Times of the iterations in seconds.
    pub per_iteration: Option<Summary>,
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Bytes per rank.
    pub bytes: u64,
    /// Elements per pair of ranks, or per rank.
    pub count: u64,
    /// The element type.
    pub element: &'static str,
    /// The operator; `none` where nothing is reduced.
    pub redop: String,
    /// Results with separate buffers for sending and receiving.
    pub out_of_place: Cells,
    /// Results with one buffer for both.
    pub in_place: Cells,
    /// The time of day, in a table that has it.
    pub timestamp: Option<String>,
}

impl Columns {
    /// The three lines above the rows, and the empty comment above them.
    #[must_use]
    pub fn header(self) -> String {
        let time = if self.cpu_time { "cputime" } else { "time" };
        let (label, format, width) = if self.timestamps {
            ("timestamp", TIMESTAMP_FORMAT, 19)
        } else {
            ("", "", 0)
        };
        let more = |texts: [&str; 4]| match self.per_iteration {
            true => texts.map(|text| format!("  {text:>7}")).concat(),
            false => String::new(),
        };
        let line = |first: [&str; 5], cells: [&str; 4], iteration: [&str; 4], last: &str| {
            let [size, count, element, op, root] = first;
            let [time, algorithm, bus, wrong] = cells;
            let placement = format!(
                "  {time:>7}  {algorithm:>6}  {bus:>6}  {wrong:>6}{}",
                more(iteration)
            );
            format!(
                "# {size:>10}  {count:>12}  {element:>8}  {op:>6}  {root:>6}{placement}{placement} \
                 {last:>width$}\n"
            )
        };
        let placements = if self.per_iteration {
            "              out-of-place (+ per-iteration)                                \
             in-place (+ per-iteration)"
        } else {
            "           out-of-place                       in-place          "
        };
        format!(
            "#\n# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}{placements}\n{}{}",
            "",
            "",
            "",
            "",
            "",
            line(
                ["size", "count", "type", "redop", "root"],
                [time, "algbw", "busbw", "#wrong"],
                ["i_min", "i_max", "i_p99", "i_cv%"],
                label,
            ),
            line(
                ["(B)", "(elements)", "", "", ""],
                ["(us)", "(GB/s)", "(GB/s)", ""],
                ["(us)", "(us)", "(us)", "(%)"],
                format,
            ),
        )
    }

    /// A row. No operation here has a root (`-1`).
    #[must_use]
    pub fn row(self, row: &Row) -> String {
        let Row {
            bytes,
            count,
            element,
            redop,
            ..
        } = row;
        let mut text = format!(
            "{bytes:>12}  {count:>12}  {element:>8}  {redop:>6}  {:>6}",
            -1
        );
        for cells in [&row.out_of_place, &row.in_place] {
            text.push_str(&cells.text());
        }
        if let (true, Some(timestamp)) = (self.timestamps, &row.timestamp) {
            text.push_str(&format!("{timestamp:>21}"));
        }
        text.push('\n');
        text
    }
}

impl Cells {
    fn text(&self) -> String {
        let wrong = match self.wrong {
            Some(wrong) => format!("  {:>6}", general(wrong as f64)),
            // One character narrower, in nccl-tests too.
            None => "    N/A".to_owned(),
        };
        let mut text = format!(
            "  {}  {}  {}{wrong}",
            cell(self.time_us, 7),
            cell(self.algorithm, 6),
            cell(self.bus, 6)
        );
        if let Some(summary) = &self.per_iteration {
            for value in [
                summary.min * 1e6,
                summary.max * 1e6,
                summary.p99 * 1e6,
                summary.variation_percent(),
            ] {
                text.push_str(&format!("  {}", cell(value, 7)));
            }
        }
        text
    }
}

/// The lines below the rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Footer {
    /// Measurements with wrong data, counted on every rank that saw it.
    pub out_of_bounds: u64,
    /// The mean of all bus bandwidths in GB/s.
    pub average_bus: f64,
    /// The bandwidth that `NCCL_TESTS_MIN_BW` asks for.
    pub needed_bus: Option<f64>,
}

impl Footer {
    /// Whether the bandwidth is at least 0.9 of what is needed; `None` without `NCCL_TESTS_MIN_BW`.
    #[must_use]
    pub fn fast_enough(&self) -> Option<bool> {
        self.needed_bus
            .map(|needed| self.average_bus >= needed * 0.9)
    }

    /// The lines below the rows, with the GPU memory used where it is to be reported: at
    /// initialisation, by the buffers, and by the collective, in bytes.
    #[must_use]
    pub fn text(&self, program: &str, memory: Option<[i64; 3]>) -> String {
        let bounds = if self.out_of_bounds > 0 {
            "FAILED"
        } else {
            "OK"
        };
        let speed = match self.fast_enough() {
            None => "",
            Some(true) => "OK",
            Some(false) => "FAILED",
        };
        let mut text = format!(
            "# {:<20} : {} {bounds}\n# {:<20} : {} {speed}\n#\n# Collective test concluded: {program}\n",
            "Out of bounds values",
            self.out_of_bounds,
            "Avg bus bandwidth",
            general(self.average_bus),
        );
        if let Some([initialization, buffers, collective]) = memory {
            text.push_str(&format!(
                "# {:<20} : Initialization {} | User-Allocated {} | Collective {} | Total  {}\n",
                "GPU memory usage",
                amount(initialization),
                amount(buffers),
                amount(collective),
                amount(initialization + buffers + collective),
            ));
        }
        text.push_str("#\n");
        text
    }
}

/// The last line: the library's last error, or an empty line.
#[must_use]
pub fn last_error(error: Option<&str>) -> String {
    match error {
        Some(error) if !error.is_empty() => format!("# error: {error}\n"),
        _ => "\n".to_owned(),
    }
}

/// Bytes in the unit that keeps them short.
fn amount(bytes: i64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for (name, size) in [("GB", 30), ("MB", 20), ("KB", 10)] {
        let size = f64::from(1u32 << size);
        if value.abs() >= size {
            value /= size;
            unit = name;
            break;
        }
    }
    let decimals = match value.abs() {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

#[cfg(test)]
mod tests;
