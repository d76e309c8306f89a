//! The caching allocator as a library, on a simulated GPU: what fits, what does not, and why.
//!
//! `cargo run --example allocator`
//!
//! Put any other implementation of `Driver` in the place of `SimGpu` to do the same on a real device.

use tare::error::Error;
use tare::gpu::alloc::config::Surroundings;
use tare::gpu::alloc::sizes::format_size;
use tare::gpu::alloc::{AllocConfig, AllocError, CachingAllocator, Policy, PoolOptions, StreamFilter, TorchVersion};
use tare::gpu::driver::sim::SimGpu;
use tare::gpu::driver::{Driver, StreamId};

const MIB: u64 = 1 << 20;

fn main() -> Result<(), Error> {
    // The rules of one torch version, and what proves them.
    let policy = Policy::pytorch(TorchVersion::new(2, 10));
    println!("{}", policy.describe());

    // A configuration as it would stand in PYTORCH_CUDA_ALLOC_CONF. A wrong one is refused with the place.
    let text = "garbage_collection_threshold:0.8";
    let (config, warnings) = AllocConfig::parse(text, &policy).map_err(|error| error.into_error("PYTORCH_CUDA_ALLOC_CONF"))?;
    for warning in warnings.iter().chain(&config.warnings(&policy, &Surroundings::default())) {
        println!("warning: {warning}");
    }

    // An allocator over a GPU of 80 MiB. `gpu` is a handle: the allocator and the program share the device.
    let gpu = SimGpu::new(80 * MIB);
    let allocator = CachingAllocator::new(gpu.clone(), policy, config);
    let main = StreamId::DEFAULT;
    let side = gpu.stream_create()?;

    // Three pairs of a small and a large block; then the large ones go. `tag` says whose a block is.
    let mut large = Vec::new();
    for layer in 0..3 {
        allocator.malloc_tagged(4 * MIB, main, layer)?;
        large.push(allocator.malloc_tagged(16 * MIB, main, 100 + layer)?.address);
    }
    for address in large {
        allocator.free(address)?;
    }

    // 48 MiB are free, but in three segments that something still lives in.
    match allocator.malloc(40 * MIB, main) {
        Err(AllocError::OutOfMemory(oom)) => {
            println!("error: {oom}");
            oom.causes().iter().for_each(|cause| println!("  {cause}"));
            oom.hints().iter().for_each(|hint| println!("hint: {hint}"));
            println!("PyTorch would say: {}", oom.pytorch_message());
        }
        other => println!("unexpected: {other:?}"),
    }

    // Memory used on another stream is free only once that stream is done with it.
    let shared = allocator.malloc(2 * MIB, main)?;
    allocator.record_stream(shared.address, side)?;
    gpu.work(side, 10);
    allocator.free(shared.address)?;
    println!("pending: {} frees", allocator.lock().pending_frees());
    gpu.advance(10);
    allocator.process_events()?;
    println!("pending: {} frees", allocator.lock().pending_frees());

    // A private pool, as for a CUDA graph.
    let pool = allocator.create_pool(PoolOptions::default());
    allocator.begin_allocate(pool, StreamFilter::Streams(vec![side]), false)?;
    let graph = allocator.malloc(MIB, side)?;
    allocator.end_allocate(pool)?;
    allocator.free(graph.address)?;
    allocator.release_pool(pool)?; // the user that `begin_allocate` added
    allocator.release_pool(pool)?; // its maker
    for released in allocator.empty_cache()? {
        println!("given back: {} at {:#x}", format_size(released.size), released.address);
    }

    println!("{}", allocator.memory_summary(true));
    println!("snapshot: {} bytes of pickle", allocator.snapshot().to_pickle().len());
    Ok(())
}
