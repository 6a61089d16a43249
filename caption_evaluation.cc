#include "fullshard/caption_evaluation.h"

#include <algorithm>

#include "ATen/ops/full.h"
#include "c10/core/GradMode.h"

namespace fullshard {
namespace {

constexpr int64_t kBatch = 250;

// Every rank runs equally many batches of equal size, so that all stay in step;
// what is over at the end repeats the first examples and is not counted.
std::vector<std::vector<int64_t>> batches_of_rank(int64_t num_examples,
                                                  int num_ranks, int rank) {
  const int64_t per_rank = (num_examples + num_ranks - 1) / num_ranks;
  std::vector<std::vector<int64_t>> batches;
  for (int64_t i = 0; i < per_rank; ++i) {
    if (i % kBatch == 0) batches.emplace_back();
    batches.back().push_back(i * num_ranks + rank);
  }
  return batches;
}

int64_t count_exact(Strategy& strategy, const CaptionDataset& data,
                    const std::vector<int64_t>& examples) {
  std::vector<int64_t> existing = examples;
  for (int64_t& example : existing) example %= data.num_examples();
  const std::vector<std::string> captions =
      caption_images(strategy, data, existing);
  int64_t exact = 0;
  for (size_t i = 0; i < examples.size(); ++i) {
    if (examples[i] < data.num_examples() &&
        captions[i] == data.caption(examples[i])) {
      ++exact;
    }
  }
  return exact;
}

}  // namespace

std::vector<std::string> caption_images(Strategy& strategy,
                                        const CaptionDataset& data,
                                        const std::vector<int64_t>& examples) {
  at::NoGradGuard no_grad;
  const auto tokens = strategy.sharded().call(
      &VisionLanguageModel::generate, data.pixels(examples),
      data.max_caption_tokens(), int64_t{CharTokenizer::kBos},
      int64_t{CharTokenizer::kEos});
  std::vector<std::string> captions;
  for (const std::vector<int64_t>& ids : tokens) {
    captions.push_back(data.tokenizer().decode(ids));
  }
  return captions;
}

CaptionScore score_captions(Strategy& strategy, const CaptionDataset& data) {
  const ProcessGroups& groups = strategy.groups();
  CaptionScore score;
  score.num_examples = data.num_examples();
  std::vector<VlmBatch> loss_batches;
  for (const std::vector<int64_t>& examples : batches_of_rank(
           data.num_examples(), groups.world_size(), groups.rank())) {
    score.num_exact += count_exact(strategy, data, examples);
    std::vector<int64_t> counted;
    for (int64_t example : examples) {
      if (example < data.num_examples()) counted.push_back(example);
    }
    // A rank without an example of its own still takes part, with a copy.
    if (counted.empty()) counted.push_back(0);
    loss_batches.push_back(data.batch(counted));
  }
  score.loss = evaluate_loss(strategy.sharded(), loss_batches);
  if (groups.world_size() > 1) {
    at::Tensor total =
        at::full({1}, score.num_exact,
                 at::TensorOptions(groups.device()).dtype(at::kLong));
    std::vector<at::Tensor> tensors = {total};
    groups.world()->allreduce(tensors)->wait();
    score.num_exact = total.item<int64_t>();
  }
  return score;
}

}  // namespace fullshard
