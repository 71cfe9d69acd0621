// cudarc's `DevicePtr` is a safe trait, so its implementors are not trusted to be memory.
fn main() {}

struct Anything<'a>(nccl::Erased<'a>);
impl<'a> nccl::SendBuffer<'a> for Anything<'a> {
    type Element = f32;
    fn erase(self) -> nccl::Erased<'a> {
        self.0
    }
}
