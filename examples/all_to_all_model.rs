//! Prints the time of an all-to-all by the cost model, from 8 to 4096 ranks, and the algorithm that the model predicts
//! to be fastest.
//!
//! ```text
//! cargo run --release --example all_to_all_model
//! cargo run --release --example all_to_all_model -- --ranks-per-node 4 --model my_cluster.json
//! ```
//!
//! The constants are published ones of NCCL, or those of a file that `CostModel::measure` wrote on the machine in
//! question. All output comes from formulas: nothing here is measured.

use std::process::ExitCode;

use nccl::all_to_all::{AllToAllAlgorithm as By, CostModel, Nodes};

const RANKS: [usize; 10] = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
const BYTES: [u64; 5] = [64, 1 << 10, 16 << 10, 256 << 10, 4 << 20];

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("all_to_all_model: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut arguments: impl Iterator<Item = String>) -> Result<(), Box<dyn std::error::Error>> {
    let (mut local, mut model) = (8, CostModel::published());
    while let Some(argument) = arguments.next() {
        let mut value = || {
            let value = arguments.next();
            value.ok_or_else(|| format!("{argument} needs a value"))
        };
        match &*argument {
            "--ranks-per-node" => local = value()?.parse()?,
            "--model" => model = CostModel::read(value()?)?,
            _ => return Err("it takes --ranks-per-node N and --model FILE".into()),
        }
    }
    println!("# The model's times for one all-to-all, in microseconds; no measurements.");
    println!("# {model}");
    println!("# {local} ranks on each node; the size is what each rank has for each other.");
    let columns: Vec<By> = ["grouped", "chunked:4", "pairwise:1", "two-level"]
        .iter()
        .map(|name| name.parse())
        .collect::<Result<_, _>>()?;
    print!("# {:>5} {:>8}", "ranks", "size");
    columns
        .iter()
        .for_each(|by| print!(" {:>12}", by.to_string()));
    println!("  {:<10}  two-level wins below", "fastest");
    for ranks in RANKS
        .into_iter()
        .filter(|ranks| ranks.is_multiple_of(local))
    {
        let nodes = Nodes::new(ranks, local)?;
        for bytes in BYTES {
            let times: Vec<_> = columns
                .iter()
                .map(|by| (by, model.microseconds(*by, nodes, bytes)))
                .collect();
            print!("{ranks:>7} {:>8}", size(bytes));
            for (_, time) in &times {
                match time {
                    Some(time) => print!(" {time:>12.1}"),
                    None => print!(" {:>12}", "-"),
                }
            }
            let known = times.iter().filter_map(|(by, time)| Some((by, (*time)?)));
            let fastest = known.min_by(|one, other| one.1.total_cmp(&other.1));
            let fastest = fastest.map_or_else(String::new, |(by, _)| by.to_string());
            let crossover = model
                .crossover(nodes)
                .map_or_else(|| String::from("never"), size);
            println!("  {fastest:<10}  {crossover}");
        }
    }
    Ok(())
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.4} KiB", bytes as f64 / 1024.0).replace(".0000", ""),
        _ => format!("{} MiB", bytes >> 20),
    }
}
