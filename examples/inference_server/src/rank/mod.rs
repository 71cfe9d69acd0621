//! A rank: a process that has a part of the model, and runs the steps that the front sends.
//!
//! ```text
//!          ┌───────────── next generation, with those that are left and those that are new ◀────────┐
//!          ▼                                                                                   │
//! join ─▶ enter: who has which part ─▶ communicator ─▶ (load) ─▶ serve: step, step, … ─────────┤ somebody is gone
//! (join)                                                            │                          │ or a step failed
//!                                                                   └─▶ end: the front says so
//! ```
//!
//! Expensive resources outlive a generation: the process, its device and stream, and its part of the weights. The communicator
//! and the caches of keys and values belong to the generation, since the progress of a failed step is unknown. The front
//! keeps the tokens, and sends them again.
//!
//! A generation numbers its ranks anew; a joiner becomes the last rank. A rank's part of the model must not depend
//! on that, or all ranks would have to load weights after each death. So the launcher's number of a rank (its *place*)
//! determines its part. A restarted process gets the same place, and the communicator of the model orders its ranks by
//! place.
//!
//! With copies of experts (`--recovery elastic`) the model is laid out by requests, and every rank has a part, whichever ranks there are. Each
//! rank says which experts it has; all of them make the same placement of that. If an expert is nowhere, it is read first; if
//! copies are missing, ranks that have them send them part by part between steps, and put them in place when all parts have arrived.
//!
//! - `copies`: where the experts are in a generation; `slots`: whose texts are where; `generations`: the loop over generations; `serve`: the work in a generation;
//! - `link`: the connection to the front; `timed`: the time of communication in a step.

mod copies;
mod generations;
mod link;
mod serve;
mod slots;
mod timed;

pub use self::generations::{RankOptions, run};
pub(crate) use self::serve::NUMBERS_PER_ROUND;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
