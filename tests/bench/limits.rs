//! The least time that a step of a model can take on a machine: the sum, over the operations of the
//! step, of the time to read what the operation needs or to multiply, whichever is longer. The same
//! as `examples/c/bench/limits.h`, which says what counts and knows no windows; a test compares the two.

/// The rates that a machine reaches.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// GB/s that memory can be read at.
    pub read_gbs: f64,
    /// TFLOP/s of large matrix products.
    pub tflops: f64,
}

impl Ceilings {
    /// Returns the least milliseconds of operations that follow each other.
    pub fn limit_ms(&self, operations: &[Work]) -> f64 {
        operations.iter().map(|work| self.operation_ms(work)).sum()
    }

    /// Returns the least milliseconds of one operation.
    pub fn operation_ms(&self, work: &Work) -> f64 {
        (work.bytes / self.read_gbs * 1e-6).max(work.flops / self.tflops * 1e-9)
    }
}

/// The work of the hardware for an operation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    pub bytes: f64,
    pub flops: f64,
}

/// The work of a model's operations: what they read and compute.
#[derive(Clone, Copy, Debug)]
pub struct ModelWork {
    /// Numbers in all weights but the embedding, the output matrix and experts.
    pub layer_weights: f64,
    /// Numbers in the output matrix.
    pub output_weights: f64,
    /// Numbers in the experts of all layers, the experts of a layer, and those that a token takes.
    pub expert_weights: f64,
    pub num_experts: f64,
    pub experts_per_token: f64,
    /// The memory that these take, quantised or not.
    pub layer_bytes: f64,
    pub output_bytes: f64,
    pub expert_bytes: f64,
    /// Bytes of keys and values of a token, in all layers.
    pub kv_bytes: f64,
    /// For a query and a key, in all layers.
    pub attention_flops: f64,
    /// The keys that a query sees at most in the layers that have a window, and their share of all
    /// layers.
    pub window: f64,
    pub windowed: f64,
}

impl ModelWork {
    /// Returns the keys that a query sees of `context`, in the mean of the layers.
    fn seen(&self, context: f64) -> f64 {
        self.windowed * context.min(self.window) + (1.0 - self.windowed) * context
    }

    /// Returns the work of the experts that are read for `rows` tokens.
    fn experts(&self, rows: f64) -> Work {
        let share = self.experts_per_token / self.num_experts;
        let is_read = 1.0 - (1.0 - share).powf(rows);
        product(self.expert_bytes * is_read, self.expert_weights * share, rows)
    }

    /// Returns the layers' matrices without experts, the output matrix, attention and experts, for one
    /// token of each of `batch` sequences of `context` tokens.
    pub fn decode(&self, batch: f64, context: f64) -> [Work; 4] {
        let pairs = batch * self.seen(context);
        [
            product(self.layer_bytes, self.layer_weights, batch),
            product(self.output_bytes, self.output_weights, batch),
            Work { bytes: pairs * self.kv_bytes, flops: pairs * self.attention_flops },
            self.experts(batch),
        ]
    }

    /// The same for a prompt of `num_tokens`, up to the logits of the last one.
    pub fn prompt(&self, num_tokens: f64) -> [Work; 4] {
        // A token attends to itself and those before it, as far as it sees them.
        let up_to = |num_tokens: f64| num_tokens * (num_tokens + 1.0) / 2.0;
        let hidden = up_to((num_tokens - self.window).max(0.0));
        let pairs = up_to(num_tokens) - self.windowed * hidden;
        [
            product(self.layer_bytes, self.layer_weights, num_tokens),
            product(self.output_bytes, self.output_weights, 1.0),
            Work { bytes: num_tokens * self.kv_bytes, flops: pairs * self.attention_flops },
            self.experts(num_tokens),
        ]
    }
}

fn product(bytes: f64, weights: f64, rows: f64) -> Work {
    Work { bytes, flops: 2.0 * weights * rows }
}
