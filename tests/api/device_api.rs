//! What kernels of a program need of NCCL: properties, teams, addresses of peers, device communicators.

use nccl::cudarc::driver::result;
use nccl::device_api::{DeviceRequirements, Team};
use nccl::one_sided::Window;
use nccl::{Communicator, ErrorKind, World};

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<Communicator, Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    Ok(world.communicator("device").stream(&stream).build()?)
}

/// Each rank stores at the address of each peer's part, without NCCL.
fn store(world: &World) -> Outcome {
    let comm = start(world)?;
    let (own, ranks) = (comm.rank(), comm.world_size());
    let properties = comm.properties()?;
    assert!(properties.device_api && properties.host_rma == Some(true));
    assert_eq!(properties.load_store_teams, Some(1));
    let near = Team::load_store(&comm)?;
    assert_eq!((near.size, near.place, near.stride), (ranks, own, 1));
    let places = (0..ranks).map(|place| near.rank_at(place));
    assert!(places.eq(0..ranks));
    let rail = Team::rail(&comm)?;
    assert_eq!((rail.size, rail.place, rail.stride), (1, 0, ranks));
    assert_eq!(rail.rank_at(0), own);

    let window: Window<u32> = comm.window(ranks)?;
    comm.barrier()?;
    for peer in 0..ranks {
        let address = window.peer_address(peer)?.expect("one host");
        let value = [(100 * own + peer) as u32];
        comm.stream().context().bind_to_thread()?;
        // SAFETY: an element of the peer's part that no other rank writes.
        unsafe { result::memcpy_htod_sync(address + 4 * own as u64, &value) }?;
    }
    comm.barrier()?;
    let expected: Vec<u32> = (0..ranks).map(|from| (100 * from + own) as u32).collect();
    assert_eq!(comm.stream().clone_dtoh(&window.view())?, expected);
    let error = window.peer_address(ranks).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::NoSuchRank { .. }),
        "{error}"
    );
    comm.barrier()?;
    comm.finalize()?;
    let error = window.peer_address(own).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Closed { .. }), "{error}");
    Ok(())
}

#[test]
fn addresses_of_peers_lead_to_their_windows_among_threads() {
    ranks_as_threads(3, |world| store(&world));
}

#[test]
fn addresses_of_peers_lead_to_their_windows_among_processes() {
    ranks_as_processes(3, |world| store(&world));
}

#[test]
fn ranks_of_other_hosts_have_no_address() {
    Ranks::new(2).ranks_per_host(1).processes(|world| {
        let comm = start(&world)?;
        assert_eq!(Team::load_store(&comm)?.size, 1);
        assert_eq!(Team::rail(&comm)?.size, 2);
        let properties = comm.properties()?;
        assert!(!properties.device_api, "{properties:?}");
        assert_eq!(properties.load_store_teams, Some(2));
        let error = comm.window::<u8>(1).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unavailable { .. }),
            "{error}"
        );
        comm.barrier()?;
        Outcome::Ok(())
    });
}

#[test]
fn without_one_sided_operations_a_window_is_refused_on_all_ranks() {
    Ranks::new(2)
        .variable("NCCL_NUM_RMA_CTX", "0")
        .processes(|world| {
            let comm = start(&world)?;
            let error = comm.window::<u8>(1).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Unavailable { .. }),
                "{error}"
            );
            comm.barrier()?;
            Outcome::Ok(())
        });
}

#[test]
fn a_device_communicator_is_made_by_nvidias_library_and_refused_by_the_emulator() {
    ranks_as_processes(2, |world| {
        let comm = start(&world)?;
        let mut needs = DeviceRequirements::default();
        needs.load_store_barriers = 4;
        needs.barriers = usize::MAX;
        let error = comm.device_communicator(&needs).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::InvalidConfig {
                    field: "barriers",
                    ..
                }
            ),
            "{error}"
        );
        // Not `comm.barrier()`, in which the other rank may still be when the emulator refuses this one.
        world.barrier("both were refused")?;
        needs.barriers = 0;
        let mut other = needs.clone();
        other.load_store_barriers += comm.rank();
        let error = comm.device_communicator(&other).unwrap_err();
        assert!(
            error.to_string().contains("rank 1 requires something else"),
            "{error}"
        );
        match comm.device_communicator(&needs) {
            Ok(device) => {
                assert!(support::on_nvidias());
                assert_eq!(device.argument().load_store_place(), (comm.rank(), 2));
                let text = format!("{device:?}");
                assert!(text.contains("\"device\""), "{text}");
                drop(device);
                comm.barrier()?;
                comm.finalize()?;
            }
            Err(error) => {
                assert!(!support::on_nvidias(), "{error}");
                assert!(
                    format!("{error:#}").contains("ncclDevCommCreate"),
                    "{error:#}"
                );
            }
        }
        Outcome::Ok(())
    });
}
