//! The page of results.

use std::fmt::Write as _;

use nccl_tools::build_info::BUILD;
use nccl_tools::{clock, machine};

use crate::deaths::Recovery;
use crate::{Figures, Plan, Spread};

pub(crate) fn write(plan: &Plan, before: &str, figures: &Figures) -> String {
    let arguments = match plan.arguments.as_str() {
        "" => String::new(),
        arguments => format!(" -- {arguments}"),
    };
    let mut page = format!(
        "# The inference server\n\nWritten by `cargo bench -p inference-server --bench serving{arguments}`, {}. The arithmetic is done on the \
         CPU and the emulator carries the data between ranks: **these figures say nothing about a GPU**, and little about models \
         of another size.\n\n- {}\n- {}\n- load (1, 5 and 15 minutes) before: {before}; after: {} (the ranks themselves are \
         part of it)\n\nRanks are processes of one machine, so those that are more than its cores share them. The client is on the \
         same cores. Figures are medians, in brackets the least and the greatest.\n",
        clock::now(),
        BUILD.line(),
        machine::line(),
        machine::load()
    );
    throughput(&mut page, plan, figures);
    agreement(&mut page, plan, figures);
    deaths(&mut page, figures);
    page
}

fn throughput(page: &mut String, plan: &Plan, figures: &Figures) {
    let _ = writeln!(
        page,
        "\n## Tokens\n\nIn each of {} turns every client asks for one text as a stream, all at the same time, on a server with 8 slots; of 16 \
         clients, 8 wait for a slot. Tokens per second are those of all clients together, prompts and HTTP included in the time. Time of a \
         step and its share of communication, with the wait for the slowest rank, are the server's own: \
         `inference_step_seconds_total`, `inference_communication_seconds_total`. \"tiny\" is the repository's model, bytes are its \
         tokens; \"smollm2\" needs the file that `scripts/get-smollm2` fetches. \
         With *copies*, the model is laid out by requests (`--recovery elastic`), with so many copies of each expert.\n\n\
         | model | ranks | copies | clients | tokens of a text | tokens/s | a step (ms) | communication (%) |\n|---|--:|--:|--:|--:|--:|--:|--:|",
        plan.turns
    );
    for found in &figures.throughput {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            found.model,
            found.ranks,
            found
                .copies
                .map_or(String::new(), |copies| copies.to_string()),
            found.clients,
            found.length,
            show(found.tokens_per_second, 1.0),
            show(found.step_seconds, 1e3),
            show(found.communication, 100.0)
        );
    }
    if !figures
        .throughput
        .iter()
        .any(|found| found.model == "smollm2")
    {
        *page += "\nsmollm2 was not measured: the file was not there.\n";
    }
}

fn agreement(page: &mut String, plan: &Plan, figures: &Figures) {
    let _ = writeln!(
        page,
        "\n## Agreeing on a step\n\nTwo servers in the default layout, one of them with `--agree-steps 10`, take turns, {} each, in alternating order; the other \
         one is idle meanwhile. The ratio is that of two turns that follow each other.\n\n\
         | ranks | clients | a step without (ms) | a step with (ms) | ratio |\n|--:|--:|--:|--:|--:|",
        2 * plan.turns
    );
    for found in &figures.agreement {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} |",
            found.ranks,
            found.clients,
            show(found.without, 1e3),
            show(found.with, 1e3),
            show(found.ratio, 1.0)
        );
    }
}

fn deaths(page: &mut String, figures: &Figures) {
    *page += "\n## Deaths\n\nRanks get SIGKILL, at random (the same each time), while nothing is done or while texts are being written as streams. Times are from before \
              the signal, seen by a client that asks `/readyz` every millisecond: until it is 503 and names rank, process and signal \
              (a front that takes 250 ms for half of the deaths fails its test), and until it is 200 again, in another generation. The longest gap is that between two pieces \
              of any of the texts, in each death. With *respawn* one server dies as often as is said; with *shrink* and *elastic* (two copies of each expert) each death \
              is the first of a server; *all copies* is the time until each expert has two copies again, or one if one rank is left, which come from other ranks while texts are written.\n\n\
              | model | ranks | recovery | texts | deaths | named (ms) | ready again (ms) | all copies (ms) | longest gap (ms) |\n|---|--:|---|--:|--:|--:|--:|--:|--:|\n";
    for death in &figures.deaths {
        let recovery = match death.recovery {
            Recovery::Respawn => String::from("respawn"),
            Recovery::Shrink => format!("shrink, to {}", death.parts),
            Recovery::Elastic => format!("elastic, to {}", death.parts),
        };
        let mut named = death
            .named
            .map_or(String::from("never seen"), |named| show(named, 1e3));
        if (1..death.kills).contains(&death.seen) {
            let _ = write!(named, ", seen {} times", death.seen);
        }
        let gap = death.gap.map_or(String::new(), |gap| show(gap, 1e3));
        let whole = death.whole.map_or(String::new(), |whole| show(whole, 1e3));
        let _ = writeln!(
            page,
            "| {} | {} | {recovery} | {} | {} | {named} | {} | {whole} | {gap} |",
            death.model,
            death.ranks,
            death.streams,
            death.kills,
            show(death.ready, 1e3)
        );
    }
}

/// A median, with the least and the greatest, to three digits at least.
fn show(
    Spread {
        least,
        median,
        greatest,
    }: Spread,
    unit: f64,
) -> String {
    let digits = match median * unit {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        _ => 2,
    };
    let show = |x: f64| format!("{:.digits$}", x * unit);
    format!("{} ({}–{})", show(median), show(least), show(greatest))
}
