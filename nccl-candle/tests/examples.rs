//! The example of tensor parallelism, on as many ranks as divide its layer.

#[path = "../examples/tensor_parallel_candle.rs"]
#[allow(dead_code, reason = "the program itself is not run")]
mod tensor_parallel_candle;

#[test]
fn tensor_parallel() {
    for ranks in [1, 2, 4] {
        nccl::testing::processes(ranks, tensor_parallel_candle::rank);
    }
}
