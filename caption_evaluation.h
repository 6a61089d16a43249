#ifndef FULLSHARD_CAPTION_EVALUATION_H_
#define FULLSHARD_CAPTION_EVALUATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fullshard/data/caption_dataset.h"
#include "fullshard/strategy.h"

namespace fullshard {

// The model's captions of these images, by greedy decoding.
// Collective; every rank gives equally many images, its own.
std::vector<std::string> caption_images(Strategy& strategy,
                                        const CaptionDataset& data,
                                        const std::vector<int64_t>& examples);

struct CaptionScore {
  double loss = 0;        // Per token.
  int64_t num_exact = 0;  // Captions that are right as a whole.
  int64_t num_examples = 0;
};

// Scores the model on all of `data`, split over the ranks. Collective.
CaptionScore score_captions(Strategy& strategy, const CaptionDataset& data);

}  // namespace fullshard

#endif  // FULLSHARD_CAPTION_EVALUATION_H_
