//! The page in `docs/results`.

use std::fmt::Write as _;
use std::path::Path;

use nccl_tools::build_info::BUILD;
use nccl_tools::statistics::median;

use super::{Init, Line, Options, RANKS, Times};

/// The contents of the page.
pub(crate) struct Page<'a> {
    pub(crate) options: &'a Options,
    pub(crate) library: &'a Path,
    /// The transports of NVIDIA's ranks.
    pub(crate) transports: Vec<String>,
    /// The load of the machine before and after.
    pub(crate) loads: [String; 2],
    pub(crate) inits: &'a [Init],
    pub(crate) lines: &'a [Line],
}

impl Page<'_> {
    pub(crate) fn write(&self) -> String {
        let mut page = String::from(
            "# NVIDIA's own NCCL on the emulator's driver: what it costs\n\n\
             **Kernels are interpreted, on CPUs. These figures say nothing about a GPU, nor about NCCL on one.** They say how \
             long a test on NVIDIA's library takes, beside one on the emulator's own NCCL.\n\n",
        );
        let [before, after] = &self.loads;
        let library = self.library.parent().and_then(Path::file_name);
        let library = library.unwrap_or(self.library.as_os_str());
        let _ = writeln!(
            page,
            "- command: `{}`, {}\n- library: {}\n- {}\n- {}\n- load (1, 5 and 15 minutes) before: {before}; after: {after}\n",
            self.options.command,
            nccl_tools::clock::now(),
            library.to_string_lossy(),
            BUILD.line(),
            nccl_tools::machine::line(),
        );
        self.how(&mut page);
        page += "## Init\n\nFrom the start of the processes until the last one has a communicator, and the longest \
                 `ncclCommInitRank` of them.\n\n\
                 | ranks | NVIDIA's (ms) | the emulator's (ms) | ratio | call: NVIDIA's (ms) | call: the emulator's (ms) |\n\
                 |--:|--:|--:|--:|--:|--:|\n";
        for init in self.inits {
            let _ = writeln!(
                page,
                "| {} | {} | {} | {:.1} | {} | {} |",
                init.ranks,
                spread(&init.all.real, 1e3),
                spread(&init.all.own, 1e3),
                ratio(&init.all),
                spread(&init.call.real, 1e3),
                spread(&init.call.own, 1e3),
            );
        }
        let mut last = None;
        for line in self.lines {
            if last.replace(line.operation) != Some(line.operation) {
                let _ = write!(
                    page,
                    "\n## {}, {RANKS} ranks\n\n\
                     | bytes of a rank | NVIDIA's (µs) | the emulator's (µs) | ratio |\n|--:|--:|--:|--:|\n",
                    line.operation.name()
                );
            }
            let _ = writeln!(
                page,
                "| {} | {} | {} | {:.1} |",
                line.bytes,
                spread(&line.times.real, 1e6),
                spread(&line.times.own, 1e6),
                ratio(&line.times)
            );
        }
        page
    }

    fn how(&self, page: &mut String) {
        let cores = nccl_tools::machine::cores().map_or(0, |cores| cores.len());
        let _ = writeln!(
            page,
            "Ranks are processes, rank i of either NCCL bound to core i modulo {cores}, as are the threads that they start. \
             They call NCCL's C functions, 20 operations and then a `cuStreamSynchronize`. The two take turns in one run, \
             {} turns each, in another order each round; those that wait sleep. Every operation was checked, element by \
             element, before it was timed. Times are medians, in brackets the least and the greatest; ratios are medians of \
             the ratios within a round. NVIDIA's ranks reach each other by: {}.\n",
            self.options.rounds,
            self.transports.join(", ")
        );
    }
}

/// Median, least and greatest.
fn spread(seconds: &[f64], unit: f64) -> String {
    let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = seconds.iter().copied().fold(0.0, f64::max);
    let median = median(seconds).unwrap_or(f64::NAN);
    let [median, least, greatest] = [median, least, greatest].map(|seconds| seconds * unit);
    format!("{median:.1} ({least:.1}–{greatest:.1})")
}

/// NVIDIA's over the emulator's.
fn ratio(times: &Times) -> f64 {
    let pairs = times.real.iter().zip(&times.own);
    let ratios: Vec<f64> = pairs.map(|(real, own)| real / own).collect();
    median(&ratios).unwrap_or(f64::NAN)
}
