// Loading a library runs its code, so that naming a file is a promise about it.
fn main() {}

fn example(path: &std::path::Path) {
    let _ = nccl::Library::load_from(path);
}
