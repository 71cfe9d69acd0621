// The routing of a plan cannot be swapped for another one, whose memory the graph does not use.
use nccl::moe::Routing;

fn main() {}

fn example(plan: &mut nccl::plan::CapturedPlan<Routing>, other: &mut Routing) {
    // As `std::mem::swap`, of whose declaration the compiler shows more where Rust's sources are installed.
    fn swap<T>(_: &mut T, _: &mut T) {}
    swap(&mut *plan.views_mut(), other);
}
