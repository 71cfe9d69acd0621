//! Links between two processes whose connections never fail, unless a test ends them.

use std::sync::Arc;

use crate::proto::id::{MemberId, Time};
use crate::proto::link::{Connection, ConnectionRequest, LinkEvent, Links};
use crate::proto::message::{Frame, Message};
use crate::proto::mistake::Mistakes;
use crate::proto::timing::Timing;

const IDS: [MemberId; 2] = [
    MemberId {
        slot: 0,
        incarnation: 7,
    },
    MemberId {
        slot: 1,
        incarnation: 8,
    },
];

struct Pair {
    links: [Links; 2],
    /// The connection in use.
    connection: Connection,
    /// The data that the second process has not received yet, as its driver's queue would have it.
    queue: Vec<Frame>,
    received: Vec<Message>,
}

impl Pair {
    fn new() -> Self {
        let links = IDS.map(|id| Links::new(id, Timing::default(), Mistakes::default()));
        let mut this = Self {
            links,
            connection: Connection(0),
            queue: Vec::new(),
            received: Vec::new(),
        };
        this.links[0].open(Time(1), IDS[1], "there");
        this.links[0].keep(IDS[1], true);
        this.connect(1);
        this.links[1].keep(IDS[0], true);
        this
    }

    fn connect(&mut self, number: u64) {
        self.connection = Connection(number);
        self.links[0].connected(Time(number), IDS[1], self.connection);
        self.carry();
    }

    /// Carries all frames but the data for the second process.
    fn carry(&mut self) {
        loop {
            let mut is_idle = true;
            for from in 0..2 {
                while let Some(request) = self.links[from].poll() {
                    let ConnectionRequest::Transmit(connection, frame) = request else {
                        continue;
                    };
                    is_idle = false;
                    match (from, frame) {
                        (0, frame @ Frame::Data { .. }) => self.queue.push(frame),
                        (_, frame) => self.links[1 - from].received(Time(2), connection, frame),
                    }
                }
            }
            while let Some(event) = self.links[1].next_event() {
                if let LinkEvent::Received { message, .. } = event {
                    self.received.push(message);
                }
            }
            if is_idle {
                return;
            }
        }
    }

    /// Hands the first of the queued data to the second process.
    fn take(&mut self) {
        let frame = self.queue.remove(0);
        self.links[1].received(Time(3), self.connection, frame);
        self.carry();
    }
}

fn reply(bytes: &Arc<[u8]>) -> Message {
    Message::Reply(Arc::clone(bytes))
}

#[test]
fn large_messages_wait_for_acknowledgements_and_arrive_in_order_also_over_the_next_connection() {
    let large: Arc<[u8]> = vec![1; 50 << 20].into();
    let small: Arc<[u8]> = vec![2; 8].into();
    let all: Vec<Message> = (0..6)
        .flat_map(|_| [reply(&large), reply(&small)])
        .collect();
    for is_cut in [false, true] {
        let mut pair = Pair::new();
        for message in &all {
            pair.links[0].send(IDS[1], 0, message.clone());
        }
        pair.carry();
        // Two large messages fit, with what is between them and behind them.
        assert_eq!(pair.queue.len(), 4);
        pair.take();
        assert_eq!(pair.queue.len(), 5);
        if is_cut {
            let connection = pair.connection;
            for links in &mut pair.links {
                links.closed(Time(4), connection);
            }
            pair.queue.clear();
            pair.connect(1000);
            assert_eq!(pair.queue.len(), 5);
        }
        while !pair.queue.is_empty() {
            pair.take();
        }
        assert!(pair.received == all);
        assert!(pair.links[0].pending(IDS[1]) <= 1);
    }
}
