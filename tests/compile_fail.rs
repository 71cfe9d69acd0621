//! What types forbid: each file of `tests/ui` does one thing that must not compile.

#[test]
fn what_must_not_compile_does_not() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
