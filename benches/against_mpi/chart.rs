//! Draws the chart: for each operation and number of ranks a panel, time over size, both logarithmic.

use std::fmt::Write as _;

use nccl_tools::plot::axis::{self, Axis};

use super::compare::{Comparison, Spread};
use super::operation::Operation;

const PANEL: (f64, f64) = (400.0, 300.0);
const GAP: (f64, f64) = (80.0, 70.0);
const CORNER: (f64, f64) = (70.0, 80.0);

/// A competitor: its name, its colour (distinguishable with colour blindness), and its times.
type Curve = (&'static str, &'static str, fn(&Comparison) -> &Vec<f64>);

const CURVES: [Curve; 3] = [
    ("emulator", "#0072b2", |one| &one.ours),
    ("Open MPI", "#d55e00", |one| &one.mpi),
    ("memcpy of as many bytes by every rank", "#666666", |one| {
        &one.memcpy
    }),
];

pub(crate) fn draw(results: &[Comparison]) -> String {
    let shown: Vec<_> = results
        .iter()
        .filter(|one| one.operation != Operation::SendRecv)
        .collect();
    let mut panels: Vec<(Operation, usize)> = Vec::new();
    for one in &shown {
        if !panels.contains(&(one.operation, one.ranks)) {
            panels.push((one.operation, one.ranks));
        }
    }
    // One scale for all panels.
    let ends = |one: &&Comparison| {
        let times = CURVES.map(|(_, _, of)| Spread::of(of(one)));
        times
            .into_iter()
            .flat_map(|time| [time.least, time.greatest])
    };
    let seconds: Vec<f64> = shown.iter().flat_map(ends).collect();
    let bytes: Vec<f64> = shown.iter().map(|one| one.bytes as f64).collect();
    let rows = panels.len().div_ceil(2);
    let width = CORNER.0 + 2.0 * PANEL.0 + GAP.0 + 20.0;
    let height = CORNER.1 + rows as f64 * (PANEL.1 + GAP.1) + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" text-anchor=\"middle\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{}\" y=\"24\" font-size=\"16\" font-weight=\"bold\">The emulator, Open MPI and memcpy: time of one \
         operation (on the CPU; no GPU is in this)</text>\n",
        width / 2.0
    );
    let mut x = CORNER.0;
    for (name, colour, _) in CURVES {
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.0} 44h28\" stroke=\"{colour}\" stroke-width=\"2\"/><circle cx=\"{:.0}\" cy=\"44\" r=\"3\" \
             fill=\"{colour}\"/><text x=\"{:.0}\" y=\"48\" text-anchor=\"start\">{name}</text>",
            x + 14.0,
            x + 36.0
        );
        x += 60.0 + 7.0 * name.len() as f64;
    }
    let _ = writeln!(
        svg,
        "<text x=\"{x:.0}\" y=\"48\" text-anchor=\"start\" fill=\"#444\">points: medians of the turns; bars: least to \
         greatest</text>"
    );
    for (index, (operation, ranks)) in panels.into_iter().enumerate() {
        let left = CORNER.0 + (index % 2) as f64 * (PANEL.0 + GAP.0);
        let top = CORNER.1 + (index / 2) as f64 * (PANEL.1 + GAP.1);
        let sizes = Axis::of_sizes(bytes.iter().copied(), left, left + PANEL.0);
        let times = Axis::of_quantities(seconds.iter().copied(), top + PANEL.1, top);
        let (Some(sizes), Some(times)) = (sizes, times) else {
            continue;
        };
        grid(&mut svg, (left, top), sizes, times);
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{:.0}\" font-weight=\"bold\">{}, {ranks} ranks</text>",
            left + PANEL.0 / 2.0,
            top - 8.0,
            operation.name()
        );
        for (_, colour, of) in CURVES {
            let mut path = String::new();
            for one in shown
                .iter()
                .filter(|one| one.operation == operation && one.ranks == ranks)
            {
                let time = Spread::of(of(one));
                let x = sizes.at(one.bytes as f64);
                let [y, low, high] =
                    [time.median, time.least, time.greatest].map(|seconds| times.at(seconds));
                path += &format!("{}{x:.1} {y:.1}", if path.is_empty() { 'M' } else { 'L' });
                let _ = writeln!(
                    svg,
                    "<path d=\"M{x:.1} {low:.1}V{high:.1}\" stroke=\"{colour}\" stroke-opacity=\"0.35\" \
                     stroke-width=\"4\"/><circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"
                );
            }
            let _ = writeln!(
                svg,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
            );
        }
    }
    svg + "</svg>\n"
}

/// The frame, and its labels.
fn grid(svg: &mut String, (left, top): (f64, f64), sizes: Axis, times: Axis) {
    let (right, bottom) = (left + PANEL.0, top + PANEL.1);
    for bytes in sizes.powers_of_two(40.0) {
        let x = sizes.at(bytes);
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#ddd\"/><text x=\"{x:.1}\" y=\"{:.0}\">{}</text>",
            bottom + 16.0,
            axis::size(bytes)
        );
    }
    for (seconds, written) in times.round_numbers() {
        let y = times.at(seconds);
        let colour = if written { "#ccc" } else { "#eee" };
        let _ = writeln!(
            svg,
            "<path d=\"M{left} {y:.1}H{right}\" stroke=\"{colour}\"/>"
        );
        if written {
            let _ = writeln!(
                svg,
                "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                y + 4.0,
                axis::time(seconds)
            );
        }
    }
    let _ = writeln!(
        svg,
        "<rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/>\
         <text x=\"{:.0}\" y=\"{:.0}\" fill=\"#444\">bytes of a rank's send buffer (K, M: powers of 1024)</text>",
        PANEL.0,
        PANEL.1,
        left + PANEL.0 / 2.0,
        bottom + 34.0
    );
}
