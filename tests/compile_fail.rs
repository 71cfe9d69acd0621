//! Errors at compile time: each file of `tests/ui` does one thing that must not compile.

/// The compiler whose messages are in `tests/ui`; other versions word them differently.
const WORDS_OF: &str = "rustc 1.95.";

#[test]
fn what_must_not_compile_does_not() {
    let rustc = nccl_tools::build_info::BUILD.rustc;
    if !rustc.starts_with(WORDS_OF) {
        nccl_tools::gpu_check::not_tested(format_args!(
            "tests/ui holds the errors of {WORDS_OF}x, and this is {rustc}"
        ));
        return;
    }
    trybuild::TestCases::new().compile_fail("ui/*.rs");
}
