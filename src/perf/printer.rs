//! The output of rank 0, to the terminal and to the JSON file.

use std::io::{self, Write};

use crate::algorithm::Algorithm;
use crate::bench::{HostCopy, Measurement, Reporter, Row, Totals};
use crate::build_info::BUILD;
use crate::clock;
use crate::failure::{Exit, Failure};
use crate::format::{self, Cells, Columns, DeviceLine, Footer};
use crate::json::Report;
use crate::options::{Algorithms, Options};
use crate::plot::{Heading, Plot};
use crate::program::Program;
use crate::progress::Progress;
use crate::shape::Shape;

/// Facts of the header beyond those of nccl-tests.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// The name of the program.
    pub(super) program: String,
    /// The version number of the headers that the bindings were made from.
    pub(super) headers: u32,
    /// The version number of the library.
    pub(super) library: u32,
    /// The release of the library.
    pub(super) release: String,
    /// The path of the library.
    pub(super) library_path: String,
    /// How the ranks were started.
    pub(super) ranks_text: String,
    /// The cores that the ranks may run on.
    pub(super) binding: String,
    /// The emulator, if there is one.
    pub(super) emulator: Option<String>,
}

/// Prints on rank 0; silent on the others.
pub(super) struct Printer {
    program: &'static Program,
    options: Options,
    facts: Facts,
    columns: Columns,
    /// `None` on all ranks but the first.
    out: Option<Box<dyn Write>>,
    progress: Progress,
    report: Option<Report>,
    ratios: Vec<String>,
    buffers: &'static str,
    plot: Plot,
    /// The number of ranks, and the name of the devices.
    devices: (usize, String),
}

impl Printer {
    /// Rank 0's printer to standard output.
    pub(super) fn speaking(
        program: &'static Program,
        options: &Options,
        facts: Facts,
        report: Option<Report>,
    ) -> Self {
        let progress = Progress::on_a_terminal();
        Self::new(
            program,
            options,
            facts,
            Some(Box::new(io::stdout())),
            progress,
            report,
        )
    }

    /// The printer of the other ranks.
    pub(super) fn silent(program: &'static Program, options: &Options, facts: Facts) -> Self {
        Self::new(program, options, facts, None, Progress::silent(), None)
    }

    fn new(
        program: &'static Program,
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
            program,
            options,
            facts,
            columns,
            out,
            progress,
            report,
            ratios: Vec::new(),
            buffers: "",
            plot: Plot::default(),
            devices: (0, String::new()),
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

    /// Prints everything up to the devices.
    pub(super) fn begin(&mut self, devices: &[DeviceLine]) -> Result<(), Failure> {
        let Facts {
            program,
            headers,
            library,
            ..
        } = &self.facts;
        let name = devices.first().map_or("", |line| line.name.as_str());
        self.devices = (devices.len(), name.to_owned());
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

    /// The lines below the devices, where nccl-tests has none.
    fn comments(&self) -> String {
        let Facts {
            release,
            library_path,
            ranks_text,
            binding,
            emulator,
            ..
        } = &self.facts;
        let mut text = format!(
            "# Program              : {}, with the output of nccl-tests\n\
             # Library              : NCCL {release} at {library_path}\n\
             # Ranks                : {ranks_text}\n\
             # Binding              : {binding}\n",
            BUILD.line()
        );
        if let Some(emulator) = emulator {
            text.push_str(&format!(
                "# Emulated             : {emulator}, no GPU: times are those of this machine's CPUs\n"
            ));
        }
        if !self.program.in_place {
            text.push_str(&format!(
                "# In-place columns     : NCCL has no {} in place; measured is one into the other buffer, and a \
                 copy back\n",
                self.program.what
            ));
        }
        text
    }

    /// Reports that the largest size was reduced to fit.
    pub(super) fn reduced(&mut self, max: u64) -> Result<(), Failure> {
        self.options.sweep.max = max;
        self.print(&format!(
            "#\n# Reducing maxBytes to {max} due to memory limitation\n"
        ))
    }

    /// Prints what is known once there are buffers.
    pub(super) fn before_tables(
        &mut self,
        buffers: &'static str,
        left_out: &[String],
    ) -> Result<(), Failure> {
        self.buffers = buffers;
        let mut text = format!("# Buffers              : {buffers}\n");
        for line in left_out {
            text.push_str(&format!("# {line}\n"));
        }
        self.print(&text)
    }

    /// Prints the end of the table and everything below it.
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
                "# memcpy ratio         : time of the {} / time of a copy of as many bytes by \
                 every rank at once, {what};\n\
                 #                        medians of 7 turns each, taken alternately\n",
                self.program.what
            ));
            text.push_str(&self.ratios.concat());
        }
        if let (Some(path), true) = (&self.options.plot, self.out.is_some()) {
            self.plot.write(path, &self.heading())?;
            text.push_str(&format!("# Plot                 : {}\n", path.display()));
        }
        text.push_str(&footer.text(&self.facts.program, memory));
        text.push_str(&format::last_error(None));
        self.print(&text)?;
        if let Some(report) = &mut self.report {
            report.totals(totals, &footer);
        }
        Ok(footer)
    }

    /// The heading of the plot.
    fn heading(&self) -> Heading {
        let (facts, options) = (&self.facts, &self.options);
        let (ranks, device) = &self.devices;
        let s = if *ranks == 1 { "" } else { "s" };
        let graph = match options.graph {
            0 => String::new(),
            launches => format!(", {launches} launches of a graph"),
        };
        let element = options.element.map(|element| format!("{}, ", element.name));
        let element = element.unwrap_or_default();
        Heading {
            title: format!("{}: {ranks} rank{s} on {device}", facts.program),
            details: format!(
                "{}; NCCL {}; {element}out of place, {} iterations{graph}; nccl-tools {}",
                clock::now(),
                facts.release,
                options.iterations,
                BUILD.version,
            ),
            warning: facts.emulator.as_ref().map(|_| {
                "Emulated: these are times of this machine's CPUs, and say nothing about a GPU."
                    .to_owned()
            }),
            time: match options.cpu_time {
                true => "host time to enqueue one operation",
                false => "latency: time of one operation",
            },
        }
    }

    /// The label of a curve, or of a ratio's line: the properties that differ between them.
    fn label(&self, shape: Shape) -> Vec<String> {
        let options = &self.options;
        let algorithm = shape.case.algorithm;
        let algorithm = algorithm.filter(|_| options.algorithms != Algorithms::Default);
        let element = options.element.is_none().then_some(shape.element().name);
        let op = shape.case.op.filter(|_| options.operators.len() > 1);
        let parts = [
            algorithm.map(|algorithm| algorithm.name.to_owned()),
            element.map(str::to_owned),
            op.map(|op| op.to_string()),
        ];
        parts.into_iter().flatten().collect()
    }

    /// Writes the JSON file, if requested, with the reason of a failure.
    pub(super) fn finish(mut self, failure: Option<&Failure>) -> Result<(), Failure> {
        self.progress.hide();
        let errors: Vec<String> = failure.iter().map(ToString::to_string).collect();
        match self.report.take() {
            Some(report) => report.write(
                &errors,
                self.facts.emulator.as_deref(),
                &self.facts.ranks_text,
                self.buffers,
            ),
            None => Ok(()),
        }
    }
}

impl Reporter for Printer {
    fn progress(&mut self, row: usize, rows: usize, shape: Shape, doing: &str) {
        let (bytes, element) = (shape.bytes, shape.element().name);
        self.progress
            .show(|| format!("{row}/{rows}: {bytes} B of {element}, {doing}"));
    }

    fn table(&mut self, algorithm: Option<&'static Algorithm>) -> Result<(), Failure> {
        let mut text = String::new();
        if let (Some(algorithm), false) =
            (algorithm, self.options.algorithms == Algorithms::Default)
        {
            text.push_str(&format!("#\n# algorithm: {}\n", algorithm.name));
        }
        text.push_str(&self.columns.header());
        self.print(&text)
    }

    fn row(&mut self, row: &Row) -> Result<(), Failure> {
        let shape = row.shape;
        let cells = |measured: &Measurement| {
            let speed = shape.speed(measured.seconds);
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
            bytes: shape.bytes,
            count: shape.count,
            element: shape.element().name,
            redop: shape.case.redop(),
            out_of_place: cells(&row.out_of_place),
            in_place: cells(&row.in_place),
            timestamp: self.columns.timestamps.then(clock::now),
        });
        if let Some(ratio) = row.ratio {
            let element = shape.element().name.to_owned();
            let label = self
                .label(shape)
                .into_iter()
                .filter(|word| *word != element);
            let label: String = label.map(|word| format!(" {word}")).collect();
            self.ratios.push(format!(
                "# memcpy ratio {:>12} B {element:>8}{label} : {:6.2} ({:.2} .. {:.2}), {:.2} us / {:.2} us\n",
                shape.bytes,
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
        let name = match &self.label(shape)[..] {
            [] => shape.element().name.to_owned(),
            words => words.join(", "),
        };
        self.plot.add(&name, row, self.columns.cpu_time);
        let notes = row.notes.iter().map(|note| format!("# {note}\n"));
        let text = notes.collect::<String>() + &text;
        self.print(&text)
    }
}

#[cfg(test)]
mod tests;
