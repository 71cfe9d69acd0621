//! What rank 0 prints, to the terminal and to the JSON file.

use std::io::{self, Write};

use crate::bandwidth;
use crate::bench::{HostCopy, Measurement, Reporter, Row, Totals};
use crate::build_info::BUILD;
use crate::clock;
use crate::failure::{Exit, Failure};
use crate::format::{self, Cells, Columns, DeviceLine, Footer};
use crate::json::Report;
use crate::options::Options;
use crate::progress::Progress;
use crate::sizes::Shape;

/// What the header has to say beyond nccl-tests'.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// The name of the program.
    pub(super) program: String,
    /// NCCL's number of the headers that the bindings were made from.
    pub(super) headers: u32,
    /// NCCL's number of the library.
    pub(super) library: u32,
    /// The release and the file of the library.
    pub(super) library_text: String,
    /// How the ranks came about.
    pub(super) ranks_text: String,
    /// The emulator, if this is one.
    pub(super) emulator: Option<String>,
}

/// Prints on rank 0, and keeps quiet on the others.
pub(super) struct Printer {
    options: Options,
    facts: Facts,
    columns: Columns,
    /// `None` on all ranks but the first.
    out: Option<Box<dyn Write>>,
    progress: Progress,
    report: Option<Report>,
    ratios: Vec<String>,
}

impl Printer {
    /// Rank 0's printer to standard output.
    pub(super) fn speaking(options: &Options, facts: Facts, report: Option<Report>) -> Self {
        let progress = Progress::on_a_terminal();
        Self::new(
            options,
            facts,
            Some(Box::new(io::stdout())),
            progress,
            report,
        )
    }

    /// The other ranks'.
    pub(super) fn silent(options: &Options, facts: Facts) -> Self {
        Self::new(options, facts, None, Progress::silent(), None)
    }

    fn new(
        options: &Options,
        facts: Facts,
        out: Option<Box<dyn Write>>,
        progress: Progress,
        report: Option<Report>,
    ) -> Self {
        let columns = Columns {
            cpu_time: options.cpu_time,
            timestamps: options.timestamps,
            per_iteration: options.per_iteration,
        };
        let options = options.clone();
        Self {
            options,
            facts,
            columns,
            out,
            progress,
            report,
            ratios: Vec::new(),
        }
    }

    fn print(&mut self, text: &str) -> Result<(), Failure> {
        self.progress.hide();
        let Some(out) = &mut self.out else {
            return Ok(());
        };
        out.write_all(text.as_bytes())
            .and_then(|()| out.flush())
            .map_err(|error| {
                let exit = match error.kind() {
                    io::ErrorKind::BrokenPipe => Exit::OutputClosed,
                    _ => Exit::Failed,
                };
                Failure::new(exit, format!("standard output cannot be written: {error}"))
            })
    }

    /// Everything up to the devices.
    pub(super) fn begin(&mut self, devices: &[DeviceLine]) -> Result<(), Failure> {
        let Facts {
            program,
            headers,
            library,
            ..
        } = &self.facts;
        let mut text = String::new();
        if let Some(report) = &mut self.report {
            report.config(&self.options, devices);
            text.push_str(&format!(
                "# Writing JSON output to {}\n",
                report.path().display()
            ));
        }
        text.push_str(&format::preamble(
            program,
            *headers,
            *library,
            &self.options,
        ));
        for line in devices {
            text.push_str(&line.text());
        }
        text.push_str(&self.comments());
        self.print(&text)
    }

    /// What stands below the devices, where nccl-tests has nothing.
    fn comments(&self) -> String {
        let Facts {
            library_text,
            ranks_text,
            emulator,
            ..
        } = &self.facts;
        let mut text = format!(
            "# Program              : {}, with the output of nccl-tests\n\
             # Library              : {library_text}\n\
             # Ranks                : {ranks_text}\n",
            BUILD.line()
        );
        if let Some(emulator) = emulator {
            text.push_str(&format!(
                "# Emulated             : {emulator}, no GPU: times are those of this machine's CPUs\n"
            ));
        }
        text.push_str(
            "# In-place columns     : NCCL has no all-to-all in place; measured is one into the \
             other buffer, and a copy back\n",
        );
        text
    }

    /// A size that does not fit was replaced.
    pub(super) fn reduced(&mut self, max: u64) -> Result<(), Failure> {
        self.options.sweep.max = max;
        self.print(&format!(
            "#\n# Reducing maxBytes to {max} due to memory limitation\n"
        ))
    }

    /// The head of the table.
    pub(super) fn header(&mut self) -> Result<(), Failure> {
        let header = self.columns.header();
        self.print(&header)
    }

    /// The end of the table and everything below it.
    pub(super) fn end(
        &mut self,
        totals: &Totals,
        needed_bus: Option<f64>,
        memory: Option<[i64; 3]>,
    ) -> Result<Footer, Failure> {
        let footer = Footer {
            out_of_bounds: totals.out_of_bounds,
            average_bus: totals.average_bus,
            needed_bus,
        };
        let mut text = String::new();
        if !self.ratios.is_empty() {
            let what = match self.facts.emulator {
                Some(_) => format!(
                    "by the CPU, in shared memory (huge pages: {})",
                    HostCopy::huge_pages()
                ),
                None => "on the device".to_owned(),
            };
            text.push_str(&format!(
                "# memcpy ratio         : time of the all-to-all / time of a copy of as many bytes by \
                 every rank at once, {what};\n\
                 #                        medians of 7 turns each, taken alternately\n"
            ));
            text.push_str(&self.ratios.concat());
        }
        text.push_str(&footer.text(&self.facts.program, memory));
        text.push_str(&format::last_error(None));
        self.print(&text)?;
        if let Some(report) = &mut self.report {
            report.totals(totals, &footer);
        }
        Ok(footer)
    }

    /// Writes the JSON file, if there is one, with the reason of a bad end.
    pub(super) fn finish(mut self, failure: Option<&Failure>) -> Result<(), Failure> {
        self.progress.hide();
        let errors: Vec<String> = failure.iter().map(ToString::to_string).collect();
        match self.report.take() {
            Some(report) => report.write(
                &errors,
                self.facts.emulator.as_deref(),
                &self.facts.ranks_text,
            ),
            None => Ok(()),
        }
    }
}

impl Reporter for Printer {
    fn progress(&mut self, row: usize, rows: usize, shape: Shape, doing: &str) {
        let (bytes, element) = (shape.total_bytes(), shape.element.name);
        self.progress
            .show(|| format!("{row}/{rows}: {bytes} B of {element}, {doing}"));
    }

    fn row(&mut self, row: &Row) -> Result<(), Failure> {
        let shape = row.shape;
        let cells = |measured: &Measurement| {
            let speed = bandwidth::all_to_all(shape.total_bytes(), shape.ranks, measured.seconds);
            let seconds = if self.columns.cpu_time {
                measured.host_seconds
            } else {
                measured.seconds
            };
            Cells {
                time_us: seconds * 1e6,
                algorithm: speed.algorithm,
                bus: speed.bus,
                wrong: measured.wrong,
                per_iteration: measured
                    .per_iteration
                    .as_ref()
                    .map(|times| times.summary.clone()),
            }
        };
        let text = self.columns.row(&format::Row {
            bytes: shape.total_bytes(),
            count: shape.count,
            element: shape.element.name,
            out_of_place: cells(&row.out_of_place),
            in_place: cells(&row.in_place),
            timestamp: self.columns.timestamps.then(clock::now),
        });
        if let Some(ratio) = row.ratio {
            self.ratios.push(format!(
                "# memcpy ratio {:>12} B {:>8} : {:6.2} ({:.2} .. {:.2}), {:.2} us / {:.2} us\n",
                shape.total_bytes(),
                shape.element.name,
                ratio.ratio,
                ratio.lowest,
                ratio.highest,
                ratio.operation_seconds * 1e6,
                ratio.copy_seconds * 1e6,
            ));
        }
        if let Some(report) = &mut self.report {
            report.row(&self.options, row);
        }
        self.print(&text)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::bench::Ratio;
    use crate::element;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn facts(emulator: Option<&str>) -> Facts {
        Facts {
            program: "all_to_all_perf".into(),
            headers: 23203,
            library: 23203,
            library_text: "NCCL 2.32.3 at /lib".into(),
            ranks_text: "2 threads".into(),
            emulator: emulator.map(str::to_owned),
        }
    }

    fn printed(emulator: Option<&str>) -> String {
        let page = Page::default();
        let out = Box::new(page.clone());
        let options = Options::default();
        let mut printer = Printer::new(
            &options,
            facts(emulator),
            Some(out),
            Progress::silent(),
            None,
        );
        let device = DeviceLine {
            rank: 0,
            pid: 1,
            host: "h".into(),
            device: 0,
            pci: [0; 3],
            name: "d".into(),
        };
        printer.begin(&[device]).unwrap();
        printer.header().unwrap();
        let measured = Measurement {
            seconds: 1e-5,
            host_seconds: 1e-6,
            wrong: Some(0),
            wrong_here: false,
            per_iteration: None,
        };
        let row = Row {
            shape: Shape::new(1024, element::FLOAT, 2),
            out_of_place: measured.clone(),
            in_place: measured,
            ratio: Some(Ratio {
                copy_seconds: 1e-6,
                operation_seconds: 2e-6,
                ratio: 2.0,
                lowest: 1.9,
                highest: 2.1,
            }),
        };
        printer.row(&row).unwrap();
        printer
            .end(
                &Totals {
                    out_of_bounds: 0,
                    average_bus: 0.25,
                },
                None,
                None,
            )
            .unwrap();
        printer.finish(None).unwrap();
        let bytes = page.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn rows_are_the_only_lines_that_are_no_comments() {
        let text = printed(Some("an emulator"));
        let rows: Vec<_> = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty())
            .collect();
        let [row] = rows[..] else { panic!("{text}") };
        assert!(row.starts_with("        1024           128     float    none      -1    10.00"));
        assert!(
            text.ends_with("# Collective test concluded: all_to_all_perf\n#\n\n"),
            "{text}"
        );
    }

    #[test]
    fn an_emulator_is_named_and_a_gpu_is_not_called_one() {
        let emulated = printed(Some("the emulator"));
        assert!(
            emulated.contains("# Emulated             : the emulator"),
            "{emulated}"
        );
        assert!(emulated.contains("by the CPU"), "{emulated}");
        let real = printed(None);
        assert!(!real.contains("mulat"), "{real}");
        assert!(real.contains("on the device"), "{real}");
    }

    #[test]
    fn the_ratio_stands_in_comments_below_the_rows() {
        let text = printed(None);
        let line =
            "# memcpy ratio         1024 B    float :   2.00 (1.90 .. 2.10), 2.00 us / 1.00 us";
        assert!(text.contains(line), "{text}");
    }
}
