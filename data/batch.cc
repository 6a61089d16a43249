#include "fullshard/data/batch.h"

#include "ATen/ops/narrow.h"
#include "ATen/ops/ne.h"
#include "ATen/ops/sum.h"

namespace fullshard {

int64_t VlmBatch::num_examples() const { return input_ids.size(0); }

int64_t VlmBatch::num_targets() const {
  const at::Tensor predicted = labels.narrow(1, 1, labels.size(1) - 1);
  return predicted.ne(kIgnoredLabel).sum().item<int64_t>();
}

}  // namespace fullshard
