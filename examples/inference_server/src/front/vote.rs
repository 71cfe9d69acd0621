//! The front's vote in the ranks' control plane: of two ranks, one goes on also when the other stands still.

use std::sync::Arc;
use std::time::Duration;

use nccl::Rendezvous;
use nccl::control::Witness;
use parking_lot::Mutex;

/// How long after a failed attempt to join the next one begins: the ranks wait for the front's vote.
const AGAIN: Duration = Duration::from_millis(200);

/// The front as a witness of the ranks of one attempt.
#[derive(Default)]
pub(super) struct Vote {
    present: Arc<Mutex<Present>>,
}

#[derive(Default)]
struct Present {
    attempt: u64,
    witness: Option<Witness>,
}

impl Vote {
    /// The variable by which ranks are told how many witnesses they wait for, and its value.
    pub(super) const OF_RANKS: (&str, &str) = ("NCCL_RUN_WITNESSES", "1");

    /// Joins the ranks of an attempt when all of them have come, instead of those of the attempt before.
    pub(super) fn join(&self, attempt: u64, rendezvous: Rendezvous) -> std::io::Result<()> {
        let present = Arc::clone(&self.present);
        let before = {
            let mut present = present.lock();
            present.attempt = attempt;
            present.witness.take()
        };
        let join = move || {
            // Its ranks are being ended.
            drop(before);
            loop {
                let joined = Witness::join(rendezvous.clone(), 0);
                let mut present = present.lock();
                let is_late = present.attempt != attempt;
                match joined {
                    Ok(witness) if is_late => {
                        drop(present);
                        drop(witness);
                    }
                    Ok(witness) => present.witness = Some(witness),
                    Err(_) if is_late => {}
                    Err(error) => {
                        drop(present);
                        note!("the front has no vote yet: {error}");
                        std::thread::sleep(AGAIN);
                        continue;
                    }
                }
                return;
            }
        };
        let thread = std::thread::Builder::new().name(String::from("vote"));
        thread.spawn(join).map(drop)
    }
}
