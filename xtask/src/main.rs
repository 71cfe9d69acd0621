//! Chores of the workspace.
#[path = "../../nccl-sys/build/generator.rs"]
mod generator;
use std::path::Path;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let pkg = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../nccl-sys"));
    let b = generator::generate(Path::new(&args[3]), &generator::stubs(pkg), |s| Ok(prettyplease::unparse(&syn::parse_file(&s)?))).unwrap();
    b.write_to(&pkg.join("src/bindings")).unwrap();
}
