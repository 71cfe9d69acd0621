//! The text of `--help`.

use super::table::{self, Name};
use crate::program::Program;

/// Returns the text of `--help`.
#[must_use]
pub fn usage(name: &str, program: &Program) -> String {
    let mut text = format!(
        "Time and verify {}, with the options\n\
         and the output of nccl-tests.\n\n\
         Usage: {name} [options]\n\n\
         Without options: as many ranks as there are GPUs, or four emulated ones, as processes\n\
         that this program starts itself. Under torchrun, srun or mpirun it is one rank.\n\n\
         Options (default in parentheses):\n",
        program.title
    );
    for entry in table::TABLE {
        if [Name::Algorithm, Name::RanksPerNode].contains(&entry.name)
            && program.algorithms.is_empty()
        {
            continue;
        }
        let letter = entry
            .letter
            .map_or("   ".to_owned(), |letter| format!("-{letter},"));
        let name = format!("{letter} --{} {}", entry.long, entry.value);
        let words = entry.help.split_whitespace().collect::<Vec<_>>().join(" ");
        text.push_str(&format!("  {name:<34} {words}\n"));
    }
    if !program.algorithms.is_empty() {
        text.push_str("\nWhat --algo knows:\n");
        for algorithm in program.algorithms {
            text.push_str(&format!("  {:<12} {}\n", algorithm.name, algorithm.about));
        }
    }
    text.push_str(
        "\nExit code: 0 all is well, 1 a rank died or something else failed, 2 bad input,\n\
         3 NCCL or CUDA failed, 4 timeout, 7 wrong elements or too slow, 128+N a rank was\n\
         killed by signal N.\n\n\
         Environment: NCCL_TESTS_DEVICE (first device), NCCL_TESTS_MIN_BW (exit code 7 below\n\
         0.9 of it), NCCL_TOOLS_SELF_TEST=flip:RANK (spoil a received byte on RANK before it is\n\
         verified, to see that a wrong element is noticed).\n",
    );
    text.push_str(program.variables);
    text
}
