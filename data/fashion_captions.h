#ifndef FULLSHARD_DATA_FASHION_CAPTIONS_H_
#define FULLSHARD_DATA_FASHION_CAPTIONS_H_

#include "absl/status/statusor.h"
#include "fullshard/data/caption_dataset.h"

namespace fullshard {

// Fashion-MNIST (Xiao et al., 2017) with class names as captions: 4,096
// training and 1,000 held-out images, inside the program.
struct FashionCaptions {
  CaptionDataset training;
  CaptionDataset held_out;
};

// Errors: kDataLoss if the embedded files are damaged.
absl::StatusOr<FashionCaptions> load_fashion_captions();

}  // namespace fullshard

#endif  // FULLSHARD_DATA_FASHION_CAPTIONS_H_
