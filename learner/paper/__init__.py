"""The TraPPM papers: a graph autoencoder, a GNN regressor per metric, and fine-tuning.

    encoder     graph autoencoder on graphs without labels; its frozen encoder embeds a graph
    regressor   embedding + static features + SAGEConv layers -> one metric, its uncertainty from
                an ensemble (preset `paper-ensemble`), and fine-tuning of V100 heads from A100
                weights (Table V): `fit(..., start=...)`
    presets     the papers' sizes and training settings, and those for a laptop core

The strategy `variance` (`learner.acquisition`) chooses labels over the embedding space, weighted by
the ensemble's uncertainty. Karthick Panner Selvam and Mats Brorsson, "TraPPM".

Departures from the papers and their code:

- The loss is that of the logarithm, since relative errors are reported.
- Training ends when architectures that it does not see no longer improve, instead of after a fixed
  number of epochs; the same architectures pick the checkpoint. The learning rate falls along half a
  cosine.
- Static features are scaled over the data set, not over the six numbers of one sample. Sizes enter
  as logarithms next to the one-hot operator, and parameters, MACs and batch sizes are corrected.
- Each graph has one label of shape (1, 1); no sample is lost at the end of an epoch.
- The frozen encoder runs without gradients, once per graph.
- Equal nodes of a batch are computed once (`distinct_nodes`). They share a dropout mask, and the
  dropout rate is rounded to 1/256. Without dropout results are equal.
- The regressor's output layer starts at zero, and its sum pooling is divided by the mean number of
  nodes of the training set.
- Fine-tuning first shifts the level by the median log ratio of the new device.
- Intervals are conformal, from the errors on the architectures that each network did not see.
"""
