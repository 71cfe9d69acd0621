// cudarc's `DevicePtr` is a safe trait, so what implements it is not taken for memory.
fn main() {}

struct Anything;
impl<'a> nccl::SendBuffer<'a> for Anything {
    type Element = f32;
    fn erase(self) -> nccl::Erased<'a> {
        unimplemented!()
    }
}
