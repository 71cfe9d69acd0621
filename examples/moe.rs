//! A mixture-of-experts layer: tokens are sent to the ranks of their experts, and the results are sent back.
//!
//! ```text
//! cargo run --release --example moe
//! ```

use std::error::Error;
use std::process::ExitCode;

use nccl::World;
use nccl::moe::{ExpertLayout, ExpertParallel};

const EXPERTS: usize = 8;
const TOKENS: usize = 16;
const TOP_K: usize = 2;
const WIDTH: usize = 32;

fn main() -> ExitCode {
    nccl::launch::local_ranks(4, rank)
}

fn rank(world: &World) -> Result<(), Box<dyn Error>> {
    nccl_emulator::install_unless_gpu()?;
    let stream = nccl::device(world.local_rank())?.new_stream()?;
    let comm = world.communicator("experts").stream(&stream).build()?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let own_experts = EXPERTS / ranks;
    let mut ep = ExpertParallel::builder(&comm)
        .with(|ep| {
            ep.experts = EXPERTS;
            ep.top_k = TOP_K;
            ep.max_tokens = TOKENS;
            ep.layout = ExpertLayout::ExpertMajor;
            ep.max_row_bytes = WIDTH * size_of::<f32>();
        })
        .build()?;
    let mut routing = ep.routing()?;

    // A router would choose the experts; here token t goes to experts t and t + 1.
    let expert = |token: usize, choice: usize| (rank + token + choice) % EXPERTS;
    let choices = (0..TOKENS).flat_map(|token| (0..TOP_K).map(move |choice| expert(token, choice)));
    let top_k: Vec<i32> = choices.map(|expert| expert as i32).collect();
    let top_k = stream.clone_htod(&top_k)?;
    let x: Vec<f32> = (0..TOKENS * WIDTH).map(|at| (at / WIDTH) as f32).collect();
    let x = stream.clone_htod(&x)?;

    // [own expert][source rank][capacity][width], where the capacity is that of all tokens.
    let rows = own_experts * ranks * TOKENS;
    let mut y = stream.alloc_zeros::<f32>(rows * WIDTH)?;
    ep.route(&top_k, &mut routing)?;
    ep.dispatch(&routing, &x, &mut y)?;

    // Expert e multiplies by e + 1.
    let per_expert = ranks * TOKENS * WIDTH;
    let mut z = stream.clone_dtoh(&y)?;
    for (own, rows) in z.chunks_mut(per_expert).enumerate() {
        let factor = (rank * own_experts + own + 1) as f32;
        rows.iter_mut().for_each(|value| *value *= factor);
    }
    let z = stream.clone_htod(&z)?;

    let weights = stream.clone_htod(&[0.5f32; TOKENS * TOP_K])?;
    let mut out = stream.alloc_zeros::<f32>(TOKENS * WIDTH)?;
    ep.combine(&routing, &z, &weights, &mut out)?;

    let out = stream.clone_dtoh(&out)?;
    for (token, row) in out.chunks(WIDTH).enumerate() {
        let factors = (0..TOP_K).map(|choice| 0.5 * (expert(token, choice) + 1) as f32);
        assert_eq!(row, [token as f32 * factors.sum::<f32>(); WIDTH]);
    }
    println!("{TOKENS} tokens have been at {TOP_K} of {EXPERTS} experts each");
    Ok(())
}
