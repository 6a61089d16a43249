#ifndef FULLSHARD_DATA_BATCH_H_
#define FULLSHARD_DATA_BATCH_H_

#include <cstdint>

#include "ATen/core/Tensor.h"

namespace fullshard {

// A label that no loss is computed for.
constexpr int64_t kIgnoredLabel = -100;

// Examples of images and text, padded on the right to one length.
struct VlmBatch {
  // Float, [examples, channels, height, width]; zeros for rows without image.
  at::Tensor pixel_values;
  // Long, [examples, tokens]. Column 0 is the begin-of-sequence token.
  at::Tensor input_ids;
  // Bool, [examples, tokens]; false from the first padding token on.
  at::Tensor attention_mask;
  // Long, [examples, tokens]; kIgnoredLabel where nothing is to be learned.
  // labels[i][t] is the target at input_ids[i][t]; the model predicts it from
  // what stands before t.
  at::Tensor labels;
  // Long, [images]; the rows that have an image, ascending.
  at::Tensor multimodal_indices;

  int64_t num_examples() const;
  // The tokens that the loss sums over: column 0 is never predicted.
  int64_t num_targets() const;
};

}  // namespace fullshard

#endif  // FULLSHARD_DATA_BATCH_H_
