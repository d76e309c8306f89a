//! What two well-known networks allocate: tensor sizes from their published layer shapes.
//!
//! `resnet-101` is the bottleneck network of He et al. (2015), blocks 3-4-23-3, 224x224 input, 1000 classes;
//! `vit-large` is ViT-L/16 of Dosovitskiy et al. (2020), 24 blocks, width 1024, MLP 4096, 16 heads.
//! Parameters and outputs have exactly these shapes. Which outputs stay for the backward pass follows the usual eager
//! implementation (a convolution saves its input, batch norm its input and two vectors, an in-place ReLU its result,
//! a linear layer its input, GELU its input, fused attention q, k, v, its output and the log-sum-exp).
//! Not modelled: library workspaces other than one scratch buffer for each 3x3 convolution (half its output), fused optimisers.

use serde::Serialize;

/// Networks a scenario can name.
pub const NAMES: &[&str] = &["resnet-101", "vit-large"];

/// What a `network` step can run.
pub const RUNS: &[&str] = &["weights", "grads", "momentum", "adamw", "copy", "forward", "backward", "inference"];

/// Which network, which pass, at what resolution and element size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Spec {
    /// One of [`NAMES`].
    pub network: String,
    /// One of [`RUNS`].
    pub run: String,
    /// Height and width of the input in pixels.
    pub image: u64,
    /// Bytes of one element of weights and activations.
    pub element: u64,
}

/// The groups a run allocates into, without the prefix.
pub fn groups(run: &str) -> &'static [&'static str] {
    match run {
        "weights" => &["weights", "buffers"],
        "grads" => &["grads"],
        "momentum" | "adamw" => &["optimizer"],
        "copy" => &["copy"],
        "forward" => &["input", "saved", "loss"],
        "backward" => &["grads"],
        _ => &["output"],
    }
}

/// One thing a run does, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// A tensor that joins a group.
    Keep {
        /// Group without the prefix.
        group: &'static str,
        /// Layer and tensor.
        label: String,
        /// Bytes.
        bytes: u64,
    },
    /// A tensor that dies within the run.
    Temp {
        /// Its number within the run.
        slot: u32,
        /// Layer and tensor.
        label: String,
        /// Bytes.
        bytes: u64,
    },
    /// The death of a temporary.
    Drop {
        /// Its number.
        slot: u32,
    },
    /// The newest `count` members of a group are freed, newest first.
    FreeNewest {
        /// Group without the prefix.
        group: &'static str,
        /// How many.
        count: usize,
    },
    /// All members of a group are freed, oldest first.
    FreeAll {
        /// Group without the prefix.
        group: &'static str,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Branch {
    None,
    /// The input is kept for a later addition.
    Open,
    /// The result of the addition.
    Close,
}

/// One operation of a network, sizes in bytes.
#[derive(Debug, Clone)]
struct Layer {
    name: String,
    /// Parameters, in elements.
    params: Vec<(&'static str, u64)>,
    /// Not trained, in elements.
    buffers: Vec<(&'static str, u64)>,
    /// Kept for the backward pass.
    saved: Vec<(&'static str, u64)>,
    /// Output that nothing saves.
    passing: u64,
    scratch: u64,
    /// Gradient of the input.
    grad: u64,
    branch: Branch,
}

fn layer(name: impl Into<String>) -> Layer {
    Layer {
        name: name.into(),
        params: Vec::new(),
        buffers: Vec::new(),
        saved: Vec::new(),
        passing: 0,
        scratch: 0,
        grad: 0,
        branch: Branch::None,
    }
}

/// Bytes of an input, and the layers, for a batch.
fn build(spec: &Spec, batch: u64) -> (u64, Vec<Layer>, u64) {
    let e = spec.element;
    let input = batch * 3 * spec.image * spec.image * e;
    let (layers, classes) = match spec.network.as_str() {
        "vit-large" => (vit_large(spec.image, batch, e), 1000),
        _ => (resnet_101(spec.image, batch, e), 1000),
    };
    (input, layers, batch * classes * e)
}

fn resnet_101(image: u64, batch: u64, e: u64) -> Vec<Layer> {
    let mut layers = Vec::new();
    let conv = |layers: &mut Vec<Layer>, name: &str, cin: u64, cout: u64, kernel: u64, side_in: u64, side_out: u64, relu: bool| {
        let out = batch * cout * side_out * side_out * e;
        let scratch = if kernel == 3 { out / 2 } else { 0 };
        layers.push(Layer {
            params: vec![("weight", cout * cin * kernel * kernel)],
            saved: vec![("output", out)],
            scratch,
            grad: batch * cin * side_in * side_in * e,
            ..layer(format!("{name}.conv"))
        });
        layers.push(Layer {
            params: vec![("weight", cout), ("bias", cout)],
            buffers: vec![("running_mean", cout), ("running_var", cout), ("num_batches_tracked", 2)],
            saved: vec![("output", out), ("save_mean", cout * 4), ("save_invstd", cout * 4)],
            grad: out,
            ..layer(format!("{name}.bn"))
        });
        if relu {
            layers.push(Layer { grad: out, ..layer(format!("{name}.relu")) });
        }
    };
    let half = image.div_ceil(2);
    conv(&mut layers, "stem", 3, 64, 7, image, half, true);
    let mut side = half.div_ceil(2);
    let pooled = batch * 64 * side * side;
    layers.push(Layer {
        saved: vec![("output", pooled * e), ("indices", pooled * 8)],
        grad: batch * 64 * half * half * e,
        ..layer("maxpool")
    });
    let mut channels = 64;
    for (stage, (blocks, width)) in [(3u64, 64u64), (4, 128), (23, 256), (3, 512)].into_iter().enumerate() {
        for block in 0..blocks {
            let name = format!("layer{}.{block}", stage + 1);
            let stride = if block == 0 && stage > 0 { 2 } else { 1 };
            let next = side.div_ceil(stride);
            let out = batch * width * 4 * next * next * e;
            layers.push(Layer { branch: Branch::Open, ..layer(format!("{name}.in")) });
            conv(&mut layers, &format!("{name}.1"), channels, width, 1, side, side, true);
            conv(&mut layers, &format!("{name}.2"), width, width, 3, side, next, true);
            conv(&mut layers, &format!("{name}.3"), width, width * 4, 1, next, next, false);
            if block == 0 {
                conv(&mut layers, &format!("{name}.downsample"), channels, width * 4, 1, side, next, false);
            }
            layers.push(Layer { grad: out, branch: Branch::Close, ..layer(format!("{name}.add_relu")) });
            channels = width * 4;
            side = next;
        }
    }
    layers.push(Layer { saved: vec![("output", batch * channels * e)], grad: batch * channels * side * side * e, ..layer("avgpool") });
    layers.push(Layer {
        params: vec![("weight", channels * 1000), ("bias", 1000)],
        passing: batch * 1000 * e,
        grad: batch * channels * e,
        ..layer("fc")
    });
    layers
}

fn vit_large(image: u64, batch: u64, e: u64) -> Vec<Layer> {
    const WIDTH: u64 = 1024;
    const MLP: u64 = 4096;
    const HEADS: u64 = 16;
    let patches = (image / 16) * (image / 16);
    let tokens = patches + 1;
    let rows = batch * tokens;
    let mut layers = vec![
        Layer {
            params: vec![("weight", WIDTH * 3 * 16 * 16), ("bias", WIDTH)],
            passing: batch * patches * WIDTH * e,
            grad: rows * WIDTH * e,
            ..layer("patch_embed")
        },
        Layer {
            params: vec![("cls_token", WIDTH), ("pos_embed", tokens * WIDTH)],
            saved: vec![("output", rows * WIDTH * e)],
            grad: rows * WIDTH * e,
            ..layer("embed")
        },
    ];
    let norm = |name: String| Layer {
        params: vec![("weight", WIDTH), ("bias", WIDTH)],
        saved: vec![("output", rows * WIDTH * e), ("mean", rows * 4), ("rstd", rows * 4)],
        grad: rows * WIDTH * e,
        ..layer(name)
    };
    for block in 0..24 {
        let name = format!("blocks.{block}");
        layers.push(Layer { branch: Branch::Open, ..layer(format!("{name}.attn_in")) });
        layers.push(norm(format!("{name}.norm1")));
        layers.push(Layer {
            params: vec![("weight", 3 * WIDTH * WIDTH), ("bias", 3 * WIDTH)],
            saved: vec![("output", rows * 3 * WIDTH * e)],
            grad: rows * WIDTH * e,
            ..layer(format!("{name}.qkv"))
        });
        layers.push(Layer {
            saved: vec![("output", rows * WIDTH * e), ("logsumexp", rows * HEADS * 4)],
            grad: rows * 3 * WIDTH * e,
            ..layer(format!("{name}.attention"))
        });
        layers.push(Layer {
            params: vec![("weight", WIDTH * WIDTH), ("bias", WIDTH)],
            passing: rows * WIDTH * e,
            grad: rows * WIDTH * e,
            ..layer(format!("{name}.proj"))
        });
        layers.push(Layer { saved: vec![("output", rows * WIDTH * e)], branch: Branch::Close, ..layer(format!("{name}.add1")) });
        layers.push(Layer { branch: Branch::Open, ..layer(format!("{name}.mlp_in")) });
        layers.push(norm(format!("{name}.norm2")));
        layers.push(Layer {
            params: vec![("weight", MLP * WIDTH), ("bias", MLP)],
            saved: vec![("output", rows * MLP * e)],
            grad: rows * WIDTH * e,
            ..layer(format!("{name}.fc1"))
        });
        layers.push(Layer { saved: vec![("output", rows * MLP * e)], grad: rows * MLP * e, ..layer(format!("{name}.gelu")) });
        layers.push(Layer {
            params: vec![("weight", WIDTH * MLP), ("bias", WIDTH)],
            passing: rows * WIDTH * e,
            grad: rows * MLP * e,
            ..layer(format!("{name}.fc2"))
        });
        layers.push(Layer { saved: vec![("output", rows * WIDTH * e)], branch: Branch::Close, ..layer(format!("{name}.add2")) });
    }
    layers.push(norm("norm".into()));
    layers.push(Layer {
        params: vec![("weight", 1000 * WIDTH), ("bias", 1000)],
        passing: batch * 1000 * e,
        grad: rows * WIDTH * e,
        ..layer("head")
    });
    layers
}

/// The number of trained parameters of a network.
pub fn parameters(network: &str, image: u64) -> u64 {
    let spec = Spec { network: network.into(), run: "weights".into(), image, element: 1 };
    build(&spec, 1).1.iter().flat_map(|layer| &layer.params).map(|(_, elements)| elements).sum()
}

/// Bytes of all trained parameters and the ops of a run for a mini-batch of `batch`.
pub fn expand(spec: &Spec, batch: u64) -> Vec<Op> {
    let (input, layers, logits) = build(spec, batch);
    let e = spec.element;
    let mut ops = Vec::new();
    let keep = |group, label: String, bytes| Op::Keep { group, label, bytes };
    match spec.run.as_str() {
        "weights" => {
            for layer in &layers {
                ops.extend(layer.params.iter().map(|(name, n)| keep("weights", format!("{}.{name}", layer.name), n * e)));
                ops.extend(layer.buffers.iter().map(|(name, n)| keep("buffers", format!("{}.{name}", layer.name), n * 4)));
            }
        }
        "grads" | "momentum" | "adamw" | "copy" => {
            let (group, copies): (&'static str, &[&str]) = match spec.run.as_str() {
                "grads" => ("grads", &["grad"]),
                "momentum" => ("optimizer", &["momentum_buffer"]),
                "copy" => ("copy", &["copy"]),
                _ => ("optimizer", &["exp_avg", "exp_avg_sq"]),
            };
            for layer in &layers {
                for (name, n) in &layer.params {
                    if spec.run == "adamw" {
                        // The step count is a tensor of its own and lives on the host unless the optimiser is capturable.
                        ops.extend(copies.iter().map(|copy| keep(group, format!("{}.{name}.{copy}", layer.name), n * e)));
                    } else {
                        ops.push(keep(group, format!("{}.{name}.{}", layer.name, copies[0]), n * e));
                    }
                }
            }
        }
        "forward" => {
            ops.push(keep("input", "images".into(), input));
            ops.push(keep("input", "labels".into(), batch * 8));
            forward(&layers, &mut ops, true);
            ops.push(keep("saved", "log_softmax.output".into(), logits));
            ops.push(keep("loss", "loss".into(), 4));
        }
        "backward" => backward(&layers, logits, e, &mut ops),
        _ => {
            ops.push(Op::Temp { slot: 0, label: "images".into(), bytes: input });
            forward(&layers, &mut ops, false);
            ops.push(keep("output", "logits".into(), logits));
            ops.push(Op::Drop { slot: 0 });
        }
    }
    ops
}

fn forward(layers: &[Layer], ops: &mut Vec<Op>, train: bool) {
    let mut slot = 1;
    // Slots whose tensor dies when the next output exists.
    let mut dying: Vec<u32> = Vec::new();
    let mut held: Vec<Vec<u32>> = Vec::new();
    for layer in layers {
        if layer.branch == Branch::Open {
            // Without a graph the branch's input is what the addition still needs.
            held.push(if train { Vec::new() } else { std::mem::take(&mut dying) });
        }
        let scratch = (layer.scratch > 0).then(|| {
            slot += 1;
            ops.push(Op::Temp { slot, label: format!("{}.workspace", layer.name), bytes: layer.scratch });
            slot
        });
        let mut born = Vec::new();
        for (name, bytes) in &layer.saved {
            let label = format!("{}.{name}", layer.name);
            if train {
                ops.push(Op::Keep { group: "saved", label, bytes: *bytes });
            } else if *name == "output" {
                slot += 1;
                ops.push(Op::Temp { slot, label, bytes: *bytes });
                born.push(slot);
            }
        }
        if layer.passing > 0 {
            slot += 1;
            ops.push(Op::Temp { slot, label: format!("{}.output", layer.name), bytes: layer.passing });
            born.push(slot);
        }
        ops.extend(scratch.map(|slot| Op::Drop { slot }));
        if !born.is_empty() || !layer.saved.is_empty() {
            ops.extend(dying.drain(..).map(|slot| Op::Drop { slot }));
            dying = born;
        }
        if layer.branch == Branch::Close {
            ops.extend(held.pop().into_iter().flatten().map(|slot| Op::Drop { slot }));
        }
    }
    ops.extend(dying.drain(..).map(|slot| Op::Drop { slot }));
}

fn backward(layers: &[Layer], logits: u64, e: u64, ops: &mut Vec<Op>) {
    let mut slot = 0;
    let mut current = slot;
    ops.push(Op::Temp { slot, label: "grad of logits".into(), bytes: logits });
    ops.push(Op::FreeNewest { group: "saved", count: 1 });
    let mut held: Vec<u32> = Vec::new();
    for layer in layers.iter().rev() {
        if layer.branch == Branch::Close {
            // The gradient of a sum is shared by both branches; the shortcut holds it until the block's input.
            held.push(current);
        }
        let scratch = (layer.scratch > 0).then(|| {
            slot += 1;
            ops.push(Op::Temp { slot, label: format!("{}.workspace", layer.name), bytes: layer.scratch });
            slot
        });
        for (name, elements) in &layer.params {
            ops.push(Op::Keep { group: "grads", label: format!("{}.{name}.grad", layer.name), bytes: elements * e });
        }
        if layer.grad > 0 {
            slot += 1;
            ops.push(Op::Temp { slot, label: format!("grad of {}.input", layer.name), bytes: layer.grad });
            if !held.contains(&current) {
                ops.push(Op::Drop { slot: current });
            }
            current = slot;
        }
        ops.extend(scratch.map(|slot| Op::Drop { slot }));
        if !layer.saved.is_empty() {
            ops.push(Op::FreeNewest { group: "saved", count: layer.saved.len() });
        }
        if layer.branch == Branch::Open
            && let Some(shared) = held.pop()
            && shared != current
        {
            ops.push(Op::Drop { slot: shared });
        }
    }
    ops.push(Op::Drop { slot: current });
    ops.push(Op::FreeAll { group: "input" });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        // 44,549,160 and 304,326,632 are the counts torchvision prints for resnet101 and vit_l_16.
        assert_eq!(parameters("resnet-101", 224), 44_549_160);
        assert_eq!(parameters("vit-large", 224), 304_326_632);
    }

    /// Live bytes after each op; panics when an op frees what is not there.
    fn walk(runs: &[&str], network: &str, batch: u64) -> (HashMap<&'static str, Vec<u64>>, u64) {
        let mut groups: HashMap<&'static str, Vec<u64>> = HashMap::new();
        let mut peak = 0;
        for run in runs {
            let spec = Spec { network: network.into(), run: (*run).into(), image: 224, element: 4 };
            let mut slots: HashMap<u32, u64> = HashMap::new();
            for op in expand(&spec, batch) {
                match op {
                    Op::Keep { group, bytes, .. } => groups.entry(group).or_default().push(bytes),
                    Op::Temp { slot, bytes, .. } => assert!(slots.insert(slot, bytes).is_none(), "slot {slot} is taken"),
                    Op::Drop { slot } => assert!(slots.remove(&slot).is_some(), "slot {slot} is dropped twice"),
                    Op::FreeNewest { group, count } => {
                        let list = groups.entry(group).or_default();
                        assert!(list.len() >= count, "{group} has fewer than {count}");
                        list.truncate(list.len() - count);
                    }
                    Op::FreeAll { group } => groups.entry(group).or_default().clear(),
                }
                peak = peak.max(groups.values().flatten().sum::<u64>() + slots.values().sum::<u64>());
            }
            assert!(slots.is_empty(), "{run} leaves temporaries behind");
        }
        (groups, peak)
    }

    #[test]
    fn a_training_step_frees_all_it_saved_and_leaves_one_gradient_for_each_parameter() {
        for network in NAMES {
            let (groups, peak) = walk(&["weights", "forward", "backward"], network, 8);
            assert!(groups["saved"].is_empty() && groups["input"].is_empty());
            assert_eq!(groups["grads"].iter().sum::<u64>(), parameters(network, 224) * 4);
            assert_eq!(groups["weights"].iter().sum::<u64>(), parameters(network, 224) * 4);
            assert!(peak > parameters(network, 224) * 8);
        }
    }

    #[test]
    fn inference_holds_far_less_than_training() {
        for network in NAMES {
            let (_, train) = walk(&["forward"], network, 8);
            let (groups, infer) = walk(&["inference"], network, 8);
            assert!(infer * 8 < train, "{network}: {infer} against {train}");
            assert_eq!(groups["output"], [8 * 1000 * 4]);
        }
    }
}
