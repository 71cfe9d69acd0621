// A group cannot be kept open: it exists only inside the closure.
fn main() {}

fn example(comm: &nccl::Communicator) {
    let mut kept = None;
    let _ = comm.group(|group| {
        kept = Some(group);
        Ok(())
    });
}
