//! What the simulator does not show: what goes over the wire, and what programs hear while a generation forms.

mod codec;
mod forming;
