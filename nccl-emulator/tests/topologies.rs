//! The machines in `topologies/`, which `NCCL_TOPO_FILE` presents to NCCL: their devices are those of the driver, and
//! their XML is of the kind that NCCL reads.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs;
use std::path::{Path, PathBuf};

use cudarc::driver::{CudaContext, sys};
use roxmltree::{Document, Node};

/// The attributes of each element that NCCL 2.27 to 2.32 read, where the real machine cannot supply them.
const NEEDED: &[(&str, &[&str])] = &[
    ("system", &["version"]),
    ("cpu", &["numaid", "arch", "vendor", "familyid", "modelid"]),
    ("pci", &["busid", "class", "link_speed", "link_width"]),
    ("gpu", &["dev", "sm"]),
    ("nvlink", &["target", "count", "tclass"]),
];

fn machines() -> Vec<(PathBuf, String)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies");
    let files = fs::read_dir(directory).expect("a directory of the crate");
    let all: Vec<_> = files
        .map(|file| {
            let path = file.expect("a file").path();
            let text = fs::read_to_string(&path).expect("text");
            (path, text)
        })
        .collect();
    assert!(!all.is_empty());
    all
}

fn elements<'a>(document: &'a Document<'a>, name: &'a str) -> impl Iterator<Item = Node<'a, 'a>> {
    document
        .descendants()
        .filter(move |node| node.has_tag_name(name))
}

/// The PCI bus id of device `ordinal` in the driver, and its compute capability times ten.
fn device(ordinal: usize) -> (String, i32) {
    let context = CudaContext::new(ordinal).expect("a device");
    let mut text = [0; 32];
    // SAFETY: the place has room for the length that is given, and the device is one of the driver's.
    let result = unsafe {
        sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, context.cu_device())
    };
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: the driver has written a C string there.
    let id = unsafe { CStr::from_ptr(text.as_ptr()) };
    let (major, minor) = context.compute_capability().expect("a capability");
    // NCCL writes bus ids in lower case, and compares them letter by letter.
    let id = id.to_str().expect("ASCII").to_lowercase();
    (id, major * 10 + minor)
}

#[test]
fn the_gpus_of_each_machine_are_the_devices_of_the_driver() {
    nccl_emulator::Emulator::new()
        .devices(8)
        .install()
        .expect("the emulator");
    for (path, text) in machines() {
        let document = Document::parse(&text).unwrap_or_else(|why| panic!("{path:?}: {why}"));
        let mut found = BTreeSet::new();
        for gpu in elements(&document, "gpu") {
            let number: usize = gpu.attribute("dev").unwrap().parse().unwrap();
            let (id, capability) = device(number);
            let parent = gpu.parent_element().expect("a PCI device");
            assert_eq!(parent.attribute("busid"), Some(&*id), "{path:?}");
            let sm = gpu.attribute("sm").unwrap();
            assert_eq!(sm, capability.to_string(), "{path:?}: {id}");
            assert!(found.insert(number), "{path:?}: device {number} twice");
        }
        assert_eq!(found, (0..8).collect(), "{path:?}");
    }
}

#[test]
fn nothing_is_left_to_the_machine_beneath_that_would_answer_differently() {
    for (path, text) in machines() {
        let document = Document::parse(&text).unwrap_or_else(|why| panic!("{path:?}: {why}"));
        for node in document.descendants().filter(Node::is_element) {
            let name = node.tag_name().name();
            let needed = NEEDED.iter().find(|needed| needed.0 == name);
            let (_, needed) = needed.unwrap_or_else(|| panic!("{path:?}: NCCL knows no {name}"));
            for attribute in *needed {
                assert!(
                    node.has_attribute(*attribute),
                    "{path:?}: {name} {attribute}"
                );
            }
        }
        let mut ids = BTreeSet::new();
        for pci in elements(&document, "pci") {
            let id = pci.attribute("busid").unwrap();
            assert!(ids.insert(id), "{path:?}: {id} twice");
            assert_eq!(id, id.to_lowercase(), "{path:?}");
        }
    }
}

/// NCCL reads XML with a few lines of its own: one space between attributes, all of them in one line, no prolog, no
/// tabulators.
#[test]
fn the_xml_is_of_the_kind_that_nccl_reads() {
    for (path, text) in machines() {
        assert!(!text.contains("<?") && !text.contains('\t'), "{path:?}");
        for line in text.lines() {
            let line = line.trim_start();
            assert!(
                line.starts_with('<') && line.ends_with('>'),
                "{path:?}: {line}"
            );
            assert!(
                line.starts_with("<!--") || !line.contains("  "),
                "{path:?}: {line}"
            );
        }
    }
}
