//! `CUDA_VISIBLE_DEVICES`, as programs and launchers set it for each rank.

mod ranks;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, result};

use ranks::alone;

fn buses() -> Vec<String> {
    let count = CudaContext::device_count().unwrap();
    let bus = |device| {
        let context = CudaContext::new(device as usize).unwrap();
        // A visible device can be used.
        let stream = context.default_stream();
        let data = stream.clone_htod(&[device; 8]).unwrap();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [device; 8]);
        let mut text = [0; 16];
        // SAFETY: a buffer of that many characters.
        unsafe {
            cudarc::driver::sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 16, context.cu_device())
        }
        .result()
        .unwrap();
        // SAFETY: queries a device that exists.
        let number = unsafe {
            result::device::get_attribute(
                context.cu_device(),
                cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            )
        };
        let bytes = text.map(|c| c as u8);
        let text = std::ffi::CStr::from_bytes_until_nul(&bytes).unwrap();
        let text = text.to_string_lossy().into_owned();
        assert_eq!(text, format!("0000:{:02X}:00.0", number.unwrap()));
        text
    };
    (0..count).map(bus).collect()
}

#[test]
fn a_process_sees_the_devices_of_its_list_in_that_order() {
    alone(
        "a_process_sees_the_devices_of_its_list_in_that_order",
        &[("CUDA_VISIBLE_DEVICES", "5,2")],
        || {
            nccl_emulator::install().unwrap();
            assert_eq!(buses(), ["0000:06:00.0", "0000:03:00.0"]);
            assert!(CudaContext::new(2).is_err());
        },
    );
}

#[test]
fn without_a_device_there_is_nothing_to_start() {
    alone(
        "without_a_device_there_is_nothing_to_start",
        &[("CUDA_VISIBLE_DEVICES", "")],
        || {
            nccl_emulator::install().unwrap();
            assert_eq!(
                result::init().unwrap_err().0,
                CUresult::CUDA_ERROR_NO_DEVICE
            );
        },
    );
}
