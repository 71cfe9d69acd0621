//! Copies the table of tried faults from its test to the page.

use crate::Result;
use crate::arguments::Arguments;
use crate::workspace::{cargo, run as run_command};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    arguments.finish()?;
    let test = [
        "test",
        "--quiet",
        "--package",
        "nccl-tests",
        "--test",
        "fault_matrix",
        "the_page_has_the_rows_of_this_table",
    ];
    run_command(cargo().args(test).env("NCCL_TEST_WRITE", "1"))
}
