//! Serves a language model on several ranks, any of which may die.
//!
//! ```text
//! cargo run --release -p inference-server --bin inference-server -- --ranks 4 --emulator
//! ```
//!
//! `--help` lists the options. The program starts itself once more for each rank.

use std::io::Write;
use std::process::ExitCode;

use inference_server::front::{self, HELP, Role};
use inference_server::rank;

fn main() -> ExitCode {
    let outcome = match Role::from_args(lexopt::Parser::from_env()) {
        Ok(Role::Front(options)) => front::serve(&options).map_err(|error| error.to_string()),
        Ok(Role::Rank(options)) => rank::run(&options).map_err(|error| error.to_string()),
        Ok(Role::Help) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("inference-server: {error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // stderr may be closed.
            let _ = writeln!(std::io::stderr(), "inference-server: {error}");
            ExitCode::FAILURE
        }
    }
}
